"""``manage.py explain REQUEST``: why it waited, where it went and how it ended."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management


class Command(ApiCommand):
    help = "Why a request waited and why it went where it went."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("request", metavar="REQUEST", help="Its X-Request-Id.")

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        waiting = api.get("queue", request_id=options["request"])["results"]
        return waiting[0] if waiting else api.get(f"decisions/{options['request']}")

    def show(self, found: Any, options: dict[str, Any]) -> None:
        if "position" in found:
            soon = found["estimate_seconds"]
            expected = "" if soon is None else f", in about {soon:.0f} s"
            self.stdout.write(
                f"It has waited {found['waited_seconds']:.1f} s for {found['model_name']} and is "
                f"served as number {found['position']}{expected}."
            )
            return
        self.stdout.write(found["explanation"])
        if found["message"]:
            self.stdout.write(found["message"])
        if found["score_parts"]:
            self.stdout.write("")
            self._scores(found)

    def _scores(self, found: dict[str, Any]) -> None:
        names = found["backend_names"]
        scorers = sorted({name for parts in found["score_parts"].values() for name in parts})
        self.table(
            ("<backend", *(name.replace("_", " ") for name in scorers), "points"),
            [
                (names.get(ident, ident), *map(parts.get, scorers), found["scores"].get(ident))
                for ident, parts in found["score_parts"].items()
            ],
        )
