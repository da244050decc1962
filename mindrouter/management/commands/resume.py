"""``manage.py resume BACKEND``: end a pause or a drain, or let a disabled one serve again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management


class Command(ApiCommand):
    help = "Let a backend serve that was paused, drained or disabled."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("backend", metavar="BACKEND")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        row = api.one("backends", name=options["backend"])
        action = "resume" if row["enabled"] else "enable"
        return api.post(f"backends/{row['id']}/{action}")

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.stdout.write(f"{found['name']} is {found['state']}.")
