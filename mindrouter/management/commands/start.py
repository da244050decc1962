"""``manage.py start``: everything on one machine, under supervisor. What ``make run`` runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.core.management.sql import emit_post_migrate_signal
from django.db import connection, connections
from django.db.migrations.executor import MigrationExecutor

from accounts.models import ApiKey, Group, User
from backends.models import Backend
from mindrouter.server import lock_data_folder

DEMO_MODEL = "smollm2"
DEMO_NAMES = ("demo-a", "demo-b")
DEMO_SLOTS = 2
#: Supervisor listens within this time, or not at all.
KNOCK_SECONDS = 30.0


class Command(BaseCommand):
    help = "Prepare the data folder, then run gateway, worker and recorder until stopped."

    supervisor_configuration = "supervisord.conf"

    def handle(self, *args: Any, **options: Any) -> None:
        self.supervise(self.prepare())

    def prepare(self) -> dict[str, str]:
        """Make the database ready and say what there is; returns supervisor's environment."""
        self._check_that_nothing_runs()
        self._migrate()
        password, key = self._first_start()
        demo = os.environ.get("DEMO", "1") != "0"
        ports = (settings.PORT + 1000, settings.PORT + 1001)
        self._register_demo(ports if demo else ())
        self._greet(password, key, demo=demo)
        return self._environment(ports, demo=demo)

    def supervise(self, environment: dict[str, str]) -> NoReturn:
        """Become supervisor."""
        connections.close_all()
        self.stdout.flush()
        _knock(environment["MINDROUTER_SOCKET"])
        supervisord = Path(sys.executable).with_name("supervisord")
        configuration = settings.BASE_DIR / "deploy" / self.supervisor_configuration
        os.execve(  # noqa: S606  no shell is wanted: supervisor takes our place
            supervisord, [str(supervisord), "--configuration", str(configuration)], environment
        )

    def _check_that_nothing_runs(self) -> None:
        try:
            os.close(lock_data_folder(settings.DATA_DIR))
        except BlockingIOError as error:
            raise CommandError(f"A router already runs on {settings.DATA_DIR}.") from error
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.HOST, settings.PORT))
            except OSError as error:
                raise CommandError(
                    f"Cannot listen on {settings.HOST}:{settings.PORT}: {error.strerror}. "
                    "Choose another port, for example: make run PORT=8010"
                ) from error

    def _migrate(self) -> None:
        """Django's own command takes as long as all the rest, also where there is nothing to do."""
        executor = MigrationExecutor(connection)
        executor.loader.check_consistent_history(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            self.stdout.write("Preparing the database …")
            call_command("migrate", verbosity=0)
        else:  # triggers and permissions, which a first start that was stopped may lack
            emit_post_migrate_signal(verbosity=0, interactive=False, db="default")

    def _first_start(self) -> tuple[str | None, str | None]:
        """Create the administrator and a first key where there are no users yet."""
        if User.objects.exists():
            return None, None
        given = os.environ.get("MINDROUTER_ADMIN_PASSWORD")
        password = given or secrets.token_urlsafe(12)
        admin = User.objects.create_superuser(
            "admin", password=password, group=Group.objects.filter(name="admin").first()
        )
        key = ApiKey.generate()
        first = ApiKey(user=admin, name="first")
        first.set_key(key)
        first.save()
        return (None if given else password), key

    def _register_demo(self, ports: tuple[int, ...]) -> None:
        """Register the demo's servers, or disable them when it is left out."""
        if not ports:
            for backend in Backend.objects.filter(name__in=DEMO_NAMES, enabled=True):
                backend.enabled = False
                backend.save()
            return
        for name, port in zip(DEMO_NAMES, ports, strict=True):
            address = f"http://127.0.0.1:{port}"
            known = {"base_url": address, "engine": "llamacpp", "max_concurrent": DEMO_SLOTS}
            backend, _ = Backend.objects.get_or_create(name=name, defaults=known)
            if (backend.base_url, backend.enabled) != (address, True):
                backend.base_url, backend.enabled = address, True
                backend.save()
            backend.models.get_or_create(name=DEMO_MODEL)

    def _greet(self, password: str | None, key: str | None, *, demo: bool) -> None:
        site = f"http://{settings.HOST}:{settings.PORT}"
        lines = ["", f"MindRouter serves {site}/v1 and its pages at {site}/admin/"]
        if password:
            lines.append(f"Sign in as admin with the password {password}  (shown only now)")
        if key:
            lines.append(f"First API key: {key}  (shown only now)")
        if demo:
            shown = key or "$KEY"
            lines += [
                "Try it:",
                f"  curl -N {site}/v1/chat/completions -H 'Authorization: Bearer {shown}' "
                "-H 'Content-Type: application/json' "
                f'-d \'{{"model": "{DEMO_MODEL}", "stream": true, '
                '"messages": [{"role": "user", "content": "Say hello."}]}\'',
            ]
        self.stdout.write("\n".join([*lines, "Stop it with Ctrl-C.", ""]))

    def _environment(self, ports: tuple[int, int], *, demo: bool) -> dict[str, str]:
        model = os.environ.get("MINDROUTER_DEMO_MODEL") or str(
            Path(sys.executable).parent.parent / "share" / "smollm2.gguf"
        )
        return {
            **os.environ,
            "MINDROUTER_DATA": str(settings.DATA_DIR),
            "HOST": settings.HOST,
            "PORT": str(settings.PORT),
            "MINDROUTER_PYTHON": sys.executable,
            "MINDROUTER_SOCKET": _socket_path(settings.DATA_DIR),
            "MINDROUTER_LOG": _log_target(settings.DATA_DIR),
            "MINDROUTER_STOP_SECONDS": str(int(settings.SHUTDOWN_GRACE) + 10),
            "MINDROUTER_WORKERS": "1",
            "MINDROUTER_CLUSTER": "true" if settings.REDIS_URL else "false",
            "MINDROUTER_DEMO": "true" if demo else "false",
            "MINDROUTER_DEMO_MODEL": model,
            "MINDROUTER_DEMO_PORT_A": str(ports[0]),
            "MINDROUTER_DEMO_PORT_B": str(ports[1]),
        }


def _knock(address: str) -> None:
    """Have supervisor, which will listen there, begin at once: it starts nothing in its first
    second, unless somebody connects."""
    if os.fork():
        return
    end = time.monotonic() + KNOCK_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knocking:
            knocking.connect(address)
            break
        time.sleep(0.01)
    os._exit(0)


def _socket_path(data_folder: Path) -> str:
    """Where supervisor listens; a socket's path must be short (108 bytes on Linux)."""
    path = str(data_folder / "supervisor.sock")
    if len(path) < 90:
        return path
    return str(Path(tempfile.mkdtemp(prefix="mindrouter-")) / "supervisor.sock")


def _log_target(data_folder: Path) -> str:
    """Our own standard output where supervisor can open it by name, else a file."""
    with contextlib.suppress(OSError), Path("/dev/fd/1").open("ab"):
        return "/dev/fd/1"
    return str(data_folder / "mindrouter.log")
