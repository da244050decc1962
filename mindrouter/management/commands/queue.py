"""``manage.py queue``: what waits, in the order of service."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management


class Command(ApiCommand):
    help = "Waiting requests (Slurm's squeue)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--start", action="store_true", help="When each is expected to start.")
        parser.add_argument("--user", help="Only this user's.")
        parser.add_argument("--model", help="Only for this model.")
        parser.add_argument("--limit", type=int, default=100, help="At most so many (100).")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        wanted = {name: options[name] for name in ("user", "model", "limit")}
        return api.get("queue", **wanted)

    def show(self, found: Any, options: dict[str, Any]) -> None:
        rows, start = found["results"], options["start"]
        self.table(
            ("<request", "<user", "<group", "<model", "position", "waited",
             *(["starts in"] if start else []), "priority"),
            [
                (one["request_id"], one["username"], one["group"], one["model_name"],
                 one["position"], f"{one['waited_seconds']:.1f} s",
                 *([_soon(one["estimate_seconds"])] if start else []), round(one["priority"]))
                for one in rows
            ],
        )  # fmt: skip
        if found["count"] > len(rows):
            self.stdout.write(f"… and {found['count'] - len(rows)} more.")


def _soon(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f} s"
