"""``manage.py cluster``: the processes of many machines on one. What ``make cluster`` runs."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from mindrouter.management.commands import start
from mindrouter.own_servers import MissingError, OwnServers
from mindrouter.settings import secret

WORKERS = 2


class Command(start.Command):
    help = "Run PostgreSQL, Redis, two schedulers, two gateways and the rest until stopped."
    supervisor_configuration = "cluster.conf"

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            password = secret("CLUSTER_PASSWORD", lambda: secrets.token_urlsafe(24))
            servers = OwnServers(settings.DATA_DIR, settings.PORT + 2000, password)
            if os.environ.get("REDIS_URL") != servers.environment["REDIS_URL"]:
                self._begin_again(servers)
            servers.make()
            with servers.running_postgresql():
                environment = self.prepare()
        except MissingError as error:
            raise CommandError(str(error)) from error
        self.supervise(environment | {"MINDROUTER_WORKERS": str(WORKERS)})

    def _begin_again(self, servers: OwnServers) -> None:
        """With the settings of a site that has these servers."""
        environment = {**os.environ, **servers.environment}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606
