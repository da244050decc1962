"""``manage.py rungateway``: the gateway, the pages and the scheduler in one process."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from mindrouter.server import lock_data_folder, serve


class Command(BaseCommand):
    help = "Serve the gateway and the pages; stays in the foreground."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.HOST)
        parser.add_argument("--port", type=int, default=settings.PORT)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            lock_data_folder(settings.DATA_DIR)
        except BlockingIOError as error:
            raise CommandError(
                f"Another gateway already runs on {settings.DATA_DIR}. "
                "Set MINDROUTER_DATA to another folder, or stop that one."
            ) from error
        serve(options["host"], options["port"])
