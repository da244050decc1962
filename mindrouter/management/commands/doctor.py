"""``manage.py doctor``: is everything there that a router needs, and what to do where it is not."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from mindrouter.cli.doctor import examine

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


class Command(BaseCommand):
    help = (
        "Look at settings, database, Redis, broker, worker, beat, spool, clock and backends. "
        "Exit status 1: something is wrong that keeps requests or records from being served."
    )
    requires_system_checks: list[str] = []  # it makes them itself, and says what to do

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="A JSON list.")

    def handle(self, *args: Any, **options: Any) -> None:
        found = []
        for one in examine():
            found.append(one)
            if not options["json"]:  # each as soon as it is known: some take seconds
                do = f"\n         {one.do}" if one.do else ""
                self.stdout.write(f"{_SIGNS[one.state]}  {one.about}: {one.what}{do}")
        if options["json"]:
            self.stdout.write(json.dumps([asdict(one) for one in found], indent=2))
        if any(one.state == "problem" for one in found):
            sys.exit(1)
