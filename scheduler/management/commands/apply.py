"""``manage.py apply FILE``: brings the configuration to what a file says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from backends.services import probe_backends
from scheduler.configuration.applying import apply_text
from scheduler.configuration.document import Invalid


class Command(BaseCommand):
    help = (
        "Apply a configuration file (YAML; - for standard input). What it does not name stays as "
        "it is; an entry with 'absent: true' is removed. Nothing changes if anything is wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE")
        parser.add_argument(
            "--dry-run", action="store_true", help="Print the difference and change nothing."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        name, dry_run = options["file"], options["dry_run"]
        try:
            changes = apply_text(_read(name), dry_run=dry_run, reason=f"apply {name}"[:100])
        except Invalid as invalid:
            raise CommandError(f"Nothing was applied.\n{invalid}") from None
        for line in changes.lines:
            self.stdout.write(line)
        if not changes.lines:
            self.stdout.write("Nothing to change.")
        if changes.backend_ids and not dry_run:
            probe_backends(changes.backend_ids, anew=True)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"Cannot read {name}: {error}") from error
