"""``manage.py prio REQUEST``: the parts of a request's priority, now or as it was served."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management

_PARTS = {
    "weight": ("weight", "user_weight"),
    "deficit": ("deficit", "user_deficit"),
    "burst_credits": ("burst credits", "burst_credits"),
    "deprioritization_factor": ("factor", "deprioritization_factor"),
    "wait_bonus": ("wait bonus", "wait_bonus"),
    "priority": ("priority", "priority"),
}


class Command(ApiCommand):
    help = "The parts of one request's priority, in tokens (Slurm's sprio)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("request", metavar="REQUEST", help="Its X-Request-Id.")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        waiting = api.get("queue", request_id=options["request"])["results"]
        if waiting:
            return {"state": "waiting", **waiting[0]}
        ended = api.get(f"decisions/{options['request']}")
        parts = {name: ended[column] for name, (_, column) in _PARTS.items()}
        return {"state": ended["outcome"], "request_id": ended["request_id"], **parts}

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.table(
            ("<request", "<state", *(title for title, _ in _PARTS.values())),
            [(found["request_id"], found["state"], *(found[name] for name in _PARTS))],
        )
