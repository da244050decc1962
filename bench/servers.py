"""The routers that are measured: nginx, ours and others, each pinned to one core.

As root they, the backend and the load get a higher priority than other work, session by session:
where that work takes the load's time, a router waits for each request, and a request that comes
alone costs three times what it costs among others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.traffic import serve_stub

ROOT = Path(__file__).parent.parent
KEY = "mr-" + "0123456789abcdef" * 4
PASSWORD = "bench-password"  # noqa: S105  of an administrator who lives as long as the bench
ROUTER_CORE = 0
NICE = -15
OURS = "MindRouter"
QUEUE_SLOTS = 64

NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_buffer_size 1m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream stubs {{
    server 127.0.0.1:{b1}; server 127.0.0.1:{b2}; keepalive 1024; keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      if ($http_authorization != "Bearer {key}") {{ return 401; }}
      proxy_pass http://stubs; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 300s;
    }}
  }}
}}
"""
SETUP = """
users:
  - {{username: bench, group: faculty}}
{users}
api_keys:
  - {{user: bench, name: bench, key: "{key}"}}
{keys}
backends:
  - name: one
    base_url: "http://127.0.0.1:{b1}"
    max_concurrent: 5000
    max_queue: 5000
    models: [{{name: bench-model}}]
  - name: two
    base_url: "http://127.0.0.1:{b2}"
    max_concurrent: 5000
    max_queue: 5000
    models: [{{name: bench-model}}]
  - name: narrow
    base_url: "http://localhost:{b1}"
    max_concurrent: {slots}
    max_queue: 100000
    models: [{{name: queued-model}}]
"""


@dataclass(slots=True)
class Router:
    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None  # None: a backend, asked directly
    key: str = KEY
    start_seconds: float = 0.0  # from its command to the first connection

    def _processes(self) -> list[Path]:
        """Those of its session: itself, and whatever it has started."""
        session = -1 if self.process is None else self.process.pid
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == session:
                    found.append(folder)
        return found

    def cpu_seconds(self) -> float:
        """Of all its processes and their threads, user and system, by the kernel's own count."""
        total = 0
        for folder in self._processes():
            for stat in folder.glob("task/*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(stat.read_text().split()[0])
        return total / 1e9

    def resident_mib(self) -> float:
        """Of all its processes."""
        total = 0
        for folder in self._processes():
            with contextlib.suppress(OSError):
                status = (folder / "status").read_text()
                total += int(status.split("VmRSS:")[1].split()[0])
        return total / 1024


def favour(pid: int, nice: int = NICE) -> None:
    """Put a process before other work on the machine, where we may. Linux counts nice values
    within a session only (autogroup), so the session's own is set, too."""
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


@contextmanager
def favoured() -> Iterator[None]:
    """The same for this process, until the end; a signal to end ends in good order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    favour(os.getpid())
    try:
        yield
    finally:
        favour(os.getpid(), 0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until something listens. Raises: RuntimeError."""
    for _ in range(6000):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.01)
    raise RuntimeError(f"nothing listens at port {port}")


@contextmanager
def backends() -> Iterator[tuple[int, int]]:
    """Two backends; their ports."""
    ports = free_port(), free_port()
    stub = multiprocessing.get_context("spawn").Process(target=_serve, args=(list(ports),))
    stub.start()
    try:
        for port in ports:
            wait_for(port)
        yield ports
    finally:
        stub.terminate()
        stub.join()


def _serve(ports: list[int]) -> None:
    os.setsid()
    favour(os.getpid())
    serve_stub(ports)


@contextmanager
def router(
    name: str, port: int, command: list[str], env: dict[str, str], log: Path, key: str = KEY
) -> Iterator[Router]:
    """A running router on its core, in a session of its own."""
    pinned = ["taskset", "-c", str(ROUTER_CORE), *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            pinned,
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    favour(process.pid)
    running = Router(name, port, process, key)
    try:
        began = time.monotonic()
        wait_for(port, process)
        running.start_seconds = time.monotonic() - began
        yield running
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}\n{log.read_text()[-2000:]}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def routers(
    folder: Path, peers: list[dict[str, str]], ports: tuple[int, int], users: int
) -> Iterator[list[Router]]:
    """A backend itself, then nginx where it is installed, the others, and ours as the last."""
    places = {"b1": ports[0], "b2": ports[1]}
    with ExitStack() as running:
        found = [Router("direct", ports[0])]
        if nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"):
            port, file = free_port(), folder / "nginx.conf"
            file.write_text(NGINX.format(folder=folder, port=port, key=KEY, **places))
            command = [nginx, "-c", str(file), "-p", str(folder)]
            log = folder / "nginx.out"
            found.append(running.enter_context(router("nginx", port, command, {}, log)))
        found += [running.enter_context(_peer(one, folder, places)) for one in peers]
        found.append(running.enter_context(gateway(folder, ports, users)))
        yield found


@contextmanager
def _peer(one: dict[str, str], folder: Path, places: dict[str, int]) -> Iterator[Router]:
    port, key = urlsplit(one["url"]).port or 80, one.get("key", KEY)
    start = one["start"].format(port=port, key=key, **places)
    log = folder / f"{one['name']}.out"
    with router(one["name"], port, shlex.split(start), {}, log, key) as running:
        yield running


def read_peers(file: Path) -> list[dict[str, str]]:
    """The tables of a file like ``peers.toml``."""
    found: list[dict[str, str]] = tomllib.loads(file.read_text())["router"]
    return found


@contextmanager
def gateway(folder: Path, ports: tuple[int, int], users: int = 0) -> Iterator[Router]:
    """Ours, with a database of its own, an administrator and so many users more."""
    data = folder / "data"
    data.mkdir()
    env = {
        "MINDROUTER_DATA": str(data),
        "DATABASE_URL": f"sqlite:///{data}/db.sqlite3",
        "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
    }
    manage = [sys.executable, str(ROOT / "manage.py")]
    for command in (
        ["migrate", "-v0"],
        ["apply", str(_setup(folder, ports, users))],
        ["createsuperuser", "--noinput", "--username", "root", "--email", "root@localhost"],
    ):
        subprocess.run(
            [*manage, *command],
            cwd=ROOT,
            env={**os.environ, **env},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    port = free_port()
    command = [*manage, "rungateway", "--port", str(port)]
    with router(OURS, port, command, env, folder / "gateway.out") as running:
        yield running


def _setup(folder: Path, ports: tuple[int, int], number: int) -> Path:
    file, many = folder / "setup.yaml", range(number)
    users = "\n".join(f"  - {{username: user{n}, group: faculty}}" for n in many)
    keys = "\n".join(f'  - {{user: user{n}, name: bench, key: "{key_of(n)}"}}' for n in many)
    b1, b2 = ports
    text = SETUP.format(key=KEY, b1=b1, b2=b2, users=users, keys=keys, slots=QUEUE_SLOTS)
    file.write_text(text)
    return file


def key_of(user: int) -> str:
    return f"mr-{user:064x}"
