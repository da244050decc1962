"""The four groups a new site starts with, under the weights that the deprecated variables had."""

from decimal import Decimal

from django.db import migrations

GROUPS = [
    ("student", Decimal(1)),
    ("staff", Decimal(2)),
    ("faculty", Decimal(3)),
    ("admin", Decimal(10)),
]


def create_groups(apps, schema_editor):
    group = apps.get_model("accounts", "Group")
    for name, weight in GROUPS:
        group.objects.get_or_create(name=name, defaults={"scheduler_weight": weight})


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_initial")]
    operations = [migrations.RunPython(create_groups, migrations.RunPython.noop)]
