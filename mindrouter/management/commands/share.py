"""``manage.py share``: weights, and what groups and users are entitled to and have received."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from mindrouter.cli.command import ApiCommand, percent
from mindrouter.cli.management import Management


class Command(ApiCommand):
    help = "Shares by group and by user (Slurm's sshare)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--group", help="Only this group and its users.")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        found = api.get("shares")
        if options["group"]:
            found["groups"] = [g for g in found["groups"] if g["name"] == options["group"]]
            found["users"] = [u for u in found["users"] if u["group"] == options["group"]]
        return found

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.stdout.write(
            f"Share mode {found['share_mode']}; received within {found['window_seconds']:g} s.\n\n"
        )
        usual = ("weight", "entitled", "received", "tokens", "waiting", "running")
        self.table(("<group", "active", *usual), [
            (one["name"], one["active_members"], *_figures(one)) for one in found["groups"]
        ])  # fmt: skip
        if found["users"]:
            self.stdout.write("")
            self.table(("<user", "<group", *usual, "deficit"), [
                (one["username"], one["group"], *_figures(one), one["deficit"])
                for one in found["users"]
            ])  # fmt: skip


def _figures(one: dict[str, Any]) -> tuple[object, ...]:
    return (
        f"{one['weight']:g}",
        percent(one["entitled"]),
        percent(one["received"]),
        round(one["recent_tokens"]),
        one["queued"],
        one["running"],
    )
