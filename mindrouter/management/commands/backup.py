"""``manage.py backup FILE``: configuration, people, history and totals in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import track

from mindrouter.cli import archive


class Command(BaseCommand):
    help = "Write configuration, people, keys (as hashes), history and totals to a file."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE")

    def handle(self, *args: Any, **options: Any) -> None:
        path = Path(options["file"])
        rows = archive.write(path)
        bar = Console(stderr=True)
        try:
            for _ in track(rows, "Writing", total=archive.count_rows(), console=bar):
                pass
        except OSError as error:
            raise CommandError(f"Cannot write {path}: {error.strerror}") from error
        self.stdout.write(
            f"{path} is written. Keep FIELD_ENCRYPTION_KEY, or the data folder's file of its name, "
            "beside it: without that, backends' own keys cannot be read."
        )
