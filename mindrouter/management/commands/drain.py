"""``manage.py drain BACKEND``: finish what runs there, nothing new, then disable it."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import CommandParser
from rich.console import Console
from rich.progress import Progress

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management

_PAUSE_SECONDS = 0.5


class Command(ApiCommand):
    help = "Let a backend finish what runs and send it nothing new; then it disables itself."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("backend", metavar="BACKEND")
        parser.add_argument("--wait", action="store_true", help="Return when nothing runs there.")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        ident = api.one("backends", name=options["backend"])["id"]
        row = api.post(f"backends/{ident}/drain")
        if options["wait"]:
            _until_empty(api, ident, options["backend"])
            row = api.get(f"backends/{ident}")
        return row

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.stdout.write(f"{found['name']} is {found['state']}.")


def _until_empty(api: Management, ident: int, name: str) -> None:
    """With a bar on standard error, which a file does not get."""
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Draining {name}", total=None)
        most = 0
        while api.get(f"backends/{ident}")["enabled"]:  # it disables itself at the end
            running = _running(api, ident)
            most = max(most, running)
            progress.update(task, total=most or None, completed=most - running)
            time.sleep(_PAUSE_SECONDS)
        progress.update(task, total=most or 1, completed=most or 1)


def _running(api: Management, ident: int) -> int:
    live = api.get("scheduler/stats")["backends"]
    return sum(one["in_flight"] for one in live if one["id"] == ident)
