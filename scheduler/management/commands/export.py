"""``manage.py export``: prints the configuration in the form that ``apply`` reads."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from scheduler.configuration.exporting import export_text


class Command(BaseCommand):
    help = (
        "Print the configuration as YAML, without passwords and keys. The API keys listed can be "
        "applied where they exist already; elsewhere each needs a 'key' of its own."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(export_text(), ending="")
