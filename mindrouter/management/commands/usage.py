"""``manage.py usage``: tokens, requests and costs of a time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser
from django.utils import timezone

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management
from scheduler.spending import BYS

_COLUMNS = ("requests", "completed", "prompt_tokens", "cached_tokens", "completion_tokens",
            "charged_tokens")  # fmt: skip


class Command(ApiCommand):
    help = "What was used, by user, group, model, key, hour or day (Slurm's sreport)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--by", choices=BYS, default="user")
        parser.add_argument("--user", help="Only this user's.")
        parser.add_argument(
            "--month",
            nargs="?",
            const="",
            type=_month,
            metavar="YYYY-MM",
            help="This month, or that one; without it the last 30 days.",
        )

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        since, until = options["month"] or (None, None)
        return api.get("usage", by=options["by"], user=options["user"], since=since, until=until)

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.stdout.write(f"From {found['since']} to {found['until']}.\n\n")
        titles = (name.replace("_tokens", "").replace("_", " ") for name in _COLUMNS)
        self.table(
            (f"<{found['by']}", *titles, f"cost ({found['currency']})", "estimated Wh"),
            [
                (
                    one["name"],
                    *(round(one[name]) for name in _COLUMNS),
                    None if one["cost"] is None else f"{one['cost']:.2f}",
                    f"{one['estimated_energy_wh']:.1f}",
                )
                for one in found["rows"]
            ],
        )


def _month(text: str) -> tuple[str, str]:
    """The first moments of a month and of the next, in the site's zone. Raises: ValueError."""
    zone = timezone.get_default_timezone()
    first = datetime.strptime(text, "%Y-%m") if text else timezone.localtime(timezone=zone)  # noqa: DTZ007
    year, month = first.year, first.month
    after = (year + 1, 1) if month == 12 else (year, month + 1)
    return (
        datetime(year, month, 1, tzinfo=zone).isoformat(),
        datetime(*after, 1, tzinfo=zone).isoformat(),
    )
