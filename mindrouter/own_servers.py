"""PostgreSQL and Redis of a site's own, below its data folder: what ``make cluster`` adds."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "mindrouter"
_REDIS = """bind 127.0.0.1
port {port}
requirepass {password}
save ""
appendonly no
dir {folder}
"""


class MissingError(Exception):
    """A program is not there, or cannot do its work; says which."""


class OwnServers:
    """Both listen on 127.0.0.1 only, at ``port`` and the next, and ask for ``password``.

    As root PostgreSQL runs as another user, since it refuses to run as root. Raises: MissingError.
    """

    def __init__(self, folder: Path, port: int, password: str) -> None:
        self.binaries = _postgresql_binaries()
        redis = shutil.which("redis-server")
        if redis is None:
            raise MissingError("redis-server is not installed")
        self.redis = redis
        self.folder = folder
        self.port = port
        self.password = password
        self.owner = _owner()

    @property
    def data(self) -> Path:
        return self.folder / "postgresql"

    @property
    def environment(self) -> dict[str, str]:
        """What the site's processes and supervisor need to know."""
        account = f":{self.password}@127.0.0.1"
        return {
            "DATABASE_URL": f"postgresql://{USER}{account}:{self.port}/postgres",
            "REDIS_URL": f"redis://{account}:{self.port + 1}/0",
            "MINDROUTER_POSTGRESQL": str(self.binaries),
            "MINDROUTER_POSTGRESQL_PORT": str(self.port),
            "MINDROUTER_POSTGRESQL_USER": self.owner.pw_name,
            "MINDROUTER_REDIS": self.redis,
        }

    def make(self) -> None:
        """Make what is not there yet."""
        configuration = self.folder / "redis.conf"
        configuration.touch(0o600)
        configuration.write_text(
            _REDIS.format(port=self.port + 1, password=self.password, folder=self.folder)
        )
        if (self.data / "PG_VERSION").exists():
            return
        if os.geteuid() == 0:
            self.folder.chmod(0o711)  # its owner has to get to its own folder, and sees no other
        self.data.mkdir(0o700, exist_ok=True)
        os.chown(self.data, self.owner.pw_uid, self.owner.pw_gid)
        with tempfile.NamedTemporaryFile("w") as secret:
            secret.write(self.password)
            secret.flush()
            os.chown(secret.name, self.owner.pw_uid, self.owner.pw_gid)
            options = ("-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8")
            self._run("initdb", "-D", str(self.data), f"--pwfile={secret.name}", *options)

    @contextmanager
    def running_postgresql(self) -> Iterator[None]:
        """For the migrations, before supervisor takes over."""
        options = f"-p {self.port} -h 127.0.0.1 -k ''"
        log = str(self.data / "start.log")
        pg_ctl = ("pg_ctl", "-D", str(self.data), "-w", "-t", "120")
        self._run(*pg_ctl, "-l", log, "-o", options, "start")
        try:
            yield
        finally:
            self._run(*pg_ctl, "-m", "fast", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        is_root = os.geteuid() == 0
        done = subprocess.run(  # noqa: S603  a program of PostgreSQL's own
            [str(self.binaries / program), *arguments],
            cwd="/",
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            user=self.owner.pw_uid if is_root else None,
            group=self.owner.pw_gid if is_root else None,
            extra_groups=[] if is_root else None,
        )
        if done.returncode:
            raise MissingError(
                f"PostgreSQL's {program} failed as user {self.owner.pw_name}, who must be able to "
                f"reach {self.data}: {done.stderr.strip()}"
            )


def _postgresql_binaries() -> Path:
    """The newest of Debian's folders, else where ``initdb`` is on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    if on_path is None:
        raise MissingError("PostgreSQL's server is not installed")
    return Path(on_path).resolve().parent


def _version(program: Path) -> float:
    try:
        return float(program.parts[-3])
    except ValueError:
        return 0.0


def _owner() -> pwd.struct_passwd:
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
