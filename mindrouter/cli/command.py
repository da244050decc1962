"""What the commands have in common that speak to the management API."""

from __future__ import annotations

import io
import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from rich.console import Console
from rich.table import Table

from mindrouter.cli.management import Management

_WIDTH_OF_FILES = 200


def add_site(parser: CommandParser) -> None:
    """The options that say which site is meant."""
    parser.add_argument("--url", help="A site's address; else MINDROUTER_URL, else this machine's.")
    parser.add_argument("--key", help="A key of its staff; else MINDROUTER_KEY.")


class ApiCommand(BaseCommand):
    """Asks, then prints what came as tables, or as it came with ``--json``."""

    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        add_site(parser)
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    def handle(self, *args: Any, **options: Any) -> None:
        with Management.of(options["url"], options["key"]) as api:
            found = self.ask(api, options)
        if options["json"]:
            self.stdout.write(json.dumps(found, indent=2))
        else:
            self.show(found, options)

    @abstractmethod
    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        """What is to be shown, as JSON has it."""

    @abstractmethod
    def show(self, found: Any, options: dict[str, Any]) -> None:
        """Print it for people."""

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Numbers to the right; None as –. Columns whose names begin with < are texts."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            is_text = name.startswith("<")
            table.add_column(name.lstrip("<"), justify="left" if is_text else "right")
        for row in rows:
            table.add_row(*map(in_words, row))
        is_terminal = self.stdout.isatty()
        console = Console(
            file=io.StringIO(),
            force_terminal=is_terminal,
            width=None if is_terminal else _WIDTH_OF_FILES,
            markup=False,
            highlight=False,
        )
        with console.capture() as text:
            console.print(table)
        self.stdout.write("\n".join(line.rstrip() for line in text.get().splitlines()))


def in_words(value: object) -> str:
    """A cell."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
    return str(value)


def percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f} %"
