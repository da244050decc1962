"""A PostgreSQL server of a test's own: a fresh cluster in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

USER = "mindrouter"


class PostgreSQL:
    """A cluster that can be stopped and started again, on the same port."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self._address = f"postgresql://{USER}@127.0.0.1:{self.port}"
        self.url = f"{self._address}/postgres"
        # The server refuses to run as root.
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = _unprivileged_user()
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self._as_user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        self._run("initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "-E", "UTF8", "-N")

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        options = {"port": self.port, "unix_socket_directories": self._folder, "fsync": "off"}
        self._process = subprocess.Popen(
            [
                self._binaries / "postgres",
                *("-D", self._folder / "data", "-h", "127.0.0.1"),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "log").open("ab"),
            **self._as_user,
        )
        ready = [self._binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port)]
        end = time.monotonic() + 30
        while subprocess.run(ready, check=False, stdout=subprocess.DEVNULL).returncode:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.05)

    def copy(self, name: str) -> str:
        """Copy the database of ``url``, which nobody may use meanwhile; returns the copy's URL."""
        with psycopg.connect(f"{self._address}/template1", autocommit=True) as other:
            other.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE postgres").format(sql.Identifier(name))
            )
        return f"{self._address}/{name}"

    def stop(self) -> None:
        """Stop it at once, as a crash would; connections break."""
        if self._process is not None:
            self._process.send_signal(subprocess.signal.SIGQUIT)  # type: ignore[attr-defined]
            self._process.wait(30)
            self._process = None

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [self._binaries / program, *map(str, arguments)],
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            **self._as_user,
        )


@contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    """A running server. Raises: FileNotFoundError where PostgreSQL is not installed."""
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-postgresql-"))
    try:
        server = PostgreSQL(find_binaries(), folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def find_binaries() -> Path:
    """The folder of PostgreSQL's programs. Raises: FileNotFoundError."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if (folder / "postgres").exists():
            return folder
    raise FileNotFoundError("PostgreSQL's programs are not installed")


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("no unprivileged user to run PostgreSQL as")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
