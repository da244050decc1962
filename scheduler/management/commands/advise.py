"""``manage.py advise``: what of the configuration does not do what it seems to."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from scheduler.advising import advice, as_json


class Command(BaseCommand):
    help = "Looks at the configuration and says what is worth a look, the gravest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="A JSON list.")

    def handle(self, *args: Any, **options: Any) -> None:
        found = advice()
        if options["json"]:
            self.stdout.write(json.dumps([as_json(one) for one in found], indent=2))
            return
        for one in found:
            self.stdout.write(f"{one.weight}: {one.what}\n  {one.why}\n  {one.do}")
        if not found:
            self.stdout.write("Nothing to say.")
