"""``manage.py restore FILE``: what ``backup`` has written, into this database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import track

from mindrouter.cli import archive


class Command(BaseCommand):
    help = "Restore a backup into a migrated database without users; all of it or nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE")
        parser.add_argument(
            "--replace", action="store_true", help="Delete the people and configuration here first."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        path, restored = Path(options["file"]), 0
        try:
            total = archive.read_header(path)["rows"]
            rows = archive.restore(path, replace=options["replace"])
            for count in track(rows, "Restoring", total=total, console=Console(stderr=True)):
                restored = count
        except archive.Unfit as why:
            raise CommandError(f"Nothing was restored. {why}") from None
        self.stdout.write(f"{restored} rows are restored.")
