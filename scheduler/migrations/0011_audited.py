import audit.records
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('scheduler', '0010_decision_retention'),
    ]

    operations = [
        migrations.AddField(
            model_name='historicalmodelprice',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalmodelprice',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalmodelprice',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalsitesettings',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalsitesettings',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalsitesettings',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        # rows that are there say nothing of it
        migrations.AlterField(
            model_name='historicalmodelprice',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalmodelprice',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalmodelprice',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalsitesettings',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalsitesettings',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalsitesettings',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
    ]
