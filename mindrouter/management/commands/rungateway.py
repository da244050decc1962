"""``manage.py rungateway``: the gateway and the pages, and without Redis the scheduler too."""

from __future__ import annotations

import socket
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from mindrouter.cli.management import write_address
from mindrouter.server import lock_data_folder, serve
from mindrouter.workers import Workers, listen, manage


class Command(BaseCommand):
    help = "Serve the gateway and the pages; stays in the foreground."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=settings.HOST)
        parser.add_argument("--port", type=int, default=settings.PORT)
        parser.add_argument(
            "--workers", type=int, default=1, help="Processes on the port; above 1 needs REDIS_URL."
        )
        parser.add_argument("--listener", type=int, help="An open socket's descriptor to serve on.")

    def handle(self, *args: Any, **options: Any) -> None:
        host, port, workers = options["host"], options["port"], options["workers"]
        if not settings.REDIS_URL:
            self._be_the_only_one(workers)
        if options["listener"] is None and settings.SERVES != "api":
            write_address(host, port)
        if options["listener"] is not None:
            serve(host, port, [socket.socket(fileno=options["listener"])])
        elif workers == 1:
            serve(host, port)
        else:
            try:
                listener = listen(host, port)
            except OSError as error:
                raise CommandError(f"Cannot listen on {host}:{port}: {error.strerror}") from error
            Workers(manage("rungateway"), listener, workers).run()

    def _be_the_only_one(self, workers: int) -> None:
        if workers != 1:
            raise CommandError(
                "Several processes need a scheduler that they share: set REDIS_URL and run "
                "manage.py runscheduler."
            )
        try:
            lock_data_folder(settings.DATA_DIR)
        except BlockingIOError as error:
            raise CommandError(
                f"Another gateway already runs on {settings.DATA_DIR}. "
                "Set MINDROUTER_DATA to another folder, or stop that one."
            ) from error
