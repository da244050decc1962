"""What a request, and a relayed event of a stream, cost the gateway in CPU, beside nginx.

    .venv/bin/python bench/gateway.py [--seconds 2] [--rounds 5] [--streams 200]
        [--crowd 1000] [--queued 10000] [--peers bench/peers.toml] [--json FILE]

The real gateway runs on core 0 with a database of its own, and nginx, where it is installed, as
a plain proxy that does nothing else; the stub backend and the load run on core 1. CPU is that of
the router's processes alone, user and system, by the kernel's own count. The routers take turns
within one run, since a machine that is busy or throttled is so for all of them: the ratios say
more than the figures. A request is 0.5 KB and its answer 1 KB, 64 connections at a time; a
stream's events have 0.2 KB and come each 50 ms. A large prompt has 400 KB, 8 connections at a time.
Times, unlike CPU, are measured beside the stub itself, asked directly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

ROOT = Path(__file__).parent.parent
KEY = "mr-" + "0123456789abcdef" * 4
ROUTER_CORE, LOAD_CORE = 0, 1
CONNECTIONS, EVENTS, PACE = 64, 200, 0.05
SMALL, LARGE = 400, 400_000  # bytes of prompt
LARGE_CONNECTIONS = 8
END = b"\r\n\r\n"
QUEUE_SLOTS, QUEUE_USERS = 64, 1000

ANSWER = (
    b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":'
    b'{"role":"assistant","content":"%b"}}],"usage":{"prompt_tokens":9,"completion_tokens":9}}'
) % (b"y" * 850)
EVENT = (
    b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"finish_reason":null,'
    b'"delta":{"content":"%019dzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz"}}]}\n\n'
)
#: When the stub wrote an event, in nanoseconds of the machine's clock.
STAMP = re.compile(rb'"content":"(\d{19})z')
LAST = (
    b'data: {"id":"c1","choices":[{"index":0,"finish_reason":"stop","delta":{}}]}\n\n'
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":100}}\n\n'
    b"data: [DONE]\n\n"
)
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d" + END
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked" + END
)
NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_buffer_size 1m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream stub {{ server 127.0.0.1:{stub}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://stub; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
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
  - name: stub
    base_url: "http://127.0.0.1:{stub}"
    max_concurrent: 5000
    max_queue: 5000
    models: [{{name: bench-model}}]
  - name: narrow
    base_url: "http://localhost:{stub}"
    max_concurrent: {slots}
    max_queue: 100000
    models: [{{name: queued-model}}]
"""


class Stub(asyncio.Protocol):
    """Answers each request, with a stream if it asks for one. From ``/hold`` to ``/release`` it
    keeps those for ``queued-model`` waiting."""

    held: list[Stub] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(END)
        at = head.lower().find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not found or len(body) < size:
            return
        self.buffer = b""
        if head.startswith(b"GET /hold"):
            Stub.held = []
        elif head.startswith(b"GET /release"):
            held, Stub.held = Stub.held or [], None
            for one in held:
                one.transport.write(PLAIN_HEAD % len(ANSWER) + ANSWER)
        elif Stub.held is not None and b'"queued-model"' in body:
            Stub.held.append(self)
            return
        if b'"stream":true' in body:
            self.transport.write(STREAM_HEAD)
            asyncio.get_running_loop().call_later(PACE, self._event, EVENTS)
        else:
            self.transport.write(PLAIN_HEAD % len(ANSWER) + ANSWER)

    def _event(self, left: int) -> None:
        if self.transport.is_closing():
            return
        data = EVENT % time.monotonic_ns() if left else LAST
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) + (b"" if left else b"0" + END))
        if left:
            asyncio.get_running_loop().call_later(PACE, self._event, left - 1)


class Asking(asyncio.Protocol):
    """One connection of the load: requests one after the other, or one stream."""

    def __init__(self, request: bytes, until: float, *, stream: bool) -> None:
        self.request = request
        self.stream = stream
        self.until = until
        self.done = 0  # answers, or events
        self.asked_at = 0.0
        self.seconds: list[float] = []  # that each answer took; of a stream, each event
        self.buffer = b""
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self.asked_at = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.stream:
            now = time.monotonic_ns()
            self.seconds += [(now - int(stamp)) / 1e9 for stamp in STAMP.findall(data)]
            self._count_events()
            return
        head, found, body = self.buffer.partition(END)
        if not found or len(body) < len(ANSWER):
            return
        if not head.startswith(b"HTTP/1.1 200") or body != ANSWER:
            self._end(RuntimeError(f"not the answer: {self.buffer[:500]!r}"))
            return
        self.buffer = b""
        self.done += 1
        self.seconds.append(time.monotonic() - self.asked_at)
        if time.monotonic() < self.until:
            self._ask()
        else:
            self._end()

    def _count_events(self) -> None:
        if self.buffer.endswith(b"0" + END):
            self.done = self.buffer.count(b"data: {") - 1  # the usage may be hidden
            stamps = STAMP.findall(self.buffer)
            wanted = len(stamps) == EVENTS and stamps == sorted(stamps)
            wanted = wanted and b"data: [DONE]" in self.buffer
            self._end(None if wanted else RuntimeError(f"not the stream: {self.buffer[:500]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RuntimeError(f"the connection was lost: {self.buffer[:300]!r} {exc}"))

    def _end(self, error: Exception | None = None) -> None:
        if not self.over.done():
            if error is None:
                self.over.set_result(self.done)
            else:
                self.over.set_exception(error)
        self.transport.close()


def request(
    key: str, model: str = "bench-model", *, stream: bool = False, prompt_bytes: int = SMALL
) -> bytes:
    body = b'{"model":"%b","stream":%b,"messages":[{"role":"user","content":"%b"}]}' % (
        model.encode(),
        b"true" if stream else b"false",
        b"x" * prompt_bytes,
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d%b%b"
    ) % (key.encode(), len(body), END, body)


async def load(
    one: Router,
    connections: int,
    seconds: float,
    *,
    stream: bool = False,
    prompt_bytes: int = SMALL,
) -> tuple[int, list[float]]:
    """How many answers, or events, have come, and the seconds that each took.

    Raises: RuntimeError for any other answer."""
    loop = asyncio.get_running_loop()
    until = time.monotonic() + seconds
    message = request(one.key, stream=stream, prompt_bytes=prompt_bytes)
    asking: list[Asking] = []
    for _ in range(connections):
        _, protocol = await loop.create_connection(
            lambda: Asking(message, until, stream=stream), "127.0.0.1", one.port
        )
        asking.append(protocol)
    count = sum(await asyncio.gather(*(each.over for each in asking)))
    return count, sorted(second for each in asking for second in each.seconds)


async def ask_once(one: Router, message: bytes) -> None:
    """One request on a connection of its own."""
    loop = asyncio.get_running_loop()
    _, asking = await loop.create_connection(
        lambda: Asking(message, 0.0, stream=False), "127.0.0.1", one.port
    )
    await asking.over


# ---- the processes


@dataclass(slots=True)
class Router:
    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None  # None: the stub, asked directly
    key: str = KEY
    start_seconds: float = 0.0  # from its command to the first connection

    @property
    def pid(self) -> int:
        assert self.process is not None  # noqa: S101  nobody measures the stub's
        return self.process.pid

    def cpu_seconds(self) -> float:
        """Of the process, its children and all their threads."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        total = 0
        for pid in (self.pid, *map(int, children.split())):
            for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                total += int(stat.read_text().split()[0])
        return total / 1e9

    def resident_mib(self) -> float:
        """Of the process alone: nginx's worker is a child, and is passed over."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def serve_stub(port: int) -> None:
    os.sched_setaffinity(0, {LOAD_CORE})

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(
            Stub, "127.0.0.1", port, backlog=4096
        )
        await server.serve_forever()

    uvloop.run(serve())


@contextmanager
def router(
    name: str, port: int, command: list[str], env: dict[str, str], key: str = KEY
) -> Iterator[Router]:
    """A running router on its core."""
    pinned = ["taskset", "-c", str(ROUTER_CORE), *command]
    with subprocess.Popen(pinned, cwd=ROOT, env={**os.environ, **env}) as process:
        try:
            began = time.monotonic()
            wait_for(port, process)
            yield Router(name, port, process, key, time.monotonic() - began)
        finally:
            process.terminate()


def wait_for(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    for _ in range(3000):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens at port {port}")


@contextmanager
def routers(folder: Path, peers: Path | None) -> Iterator[list[Router]]:
    """The stub and all that is measured before it; the stub itself is the first."""
    stub = free_port()
    backend = multiprocessing.get_context("spawn").Process(target=serve_stub, args=(stub,))
    backend.start()
    try:
        wait_for(stub)
        with ExitStack() as running:
            found = [Router("direct", stub)]
            if nginx := shutil.which("nginx"):
                port, file = free_port(), folder / "nginx.conf"
                file.write_text(NGINX.format(folder=folder, stub=stub, port=port))
                command = [nginx, "-c", str(file), "-p", str(folder)]
                found.append(running.enter_context(router("nginx", port, command, {})))
            for one in tomllib.loads(peers.read_text())["router"] if peers else ():
                port = urlsplit(one["url"]).port or 80
                command = shlex.split(one["start"].format(stub=stub, port=port))
                key = one.get("key", KEY)
                found.append(running.enter_context(router(one["name"], port, command, {}, key)))
            found.append(running.enter_context(gateway(folder, stub)))
            yield found
    finally:
        backend.terminate()
        backend.join()


@contextmanager
def gateway(folder: Path, stub: int) -> Iterator[Router]:
    env = {
        "MINDROUTER_DATA": str(folder / "data"),
        "DATABASE_URL": f"sqlite:///{folder}/data/db.sqlite3",
    }
    (folder / "data").mkdir()
    setup = folder / "setup.yaml"
    many = range(QUEUE_USERS)
    users = "\n".join(f"  - {{username: user{n}, group: faculty}}" for n in many)
    keys = "\n".join(f'  - {{user: user{n}, name: bench, key: "{key_of(n)}"}}' for n in many)
    setup.write_text(SETUP.format(key=KEY, stub=stub, users=users, keys=keys, slots=QUEUE_SLOTS))
    manage = [sys.executable, str(ROOT / "manage.py")]
    for command in (["migrate", "-v0"], ["apply", str(setup)]):
        subprocess.run(
            [*manage, *command],
            cwd=ROOT,
            env={**os.environ, **env},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    port = free_port()
    command = [*manage, "rungateway", "--port", str(port)]
    with router("MindRouter", port, command, env) as running:
        yield running


def key_of(user: int) -> str:
    return f"mr-{user:064x}"


# ---- measuring


@dataclass(slots=True)
class Figures:
    """What was measured, by title and router: printed, and kept for ``--json``."""

    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, title: str, values: dict[str, list[float]], floor: str = "nginx") -> None:
        """Medians, and how they stand to the floor's."""
        print(title)
        rows = self.found[title] = {}
        against = statistics.median(values[floor]) if floor in values else 0.0
        for name, each in values.items():
            middle = statistics.median(each)
            rows[name] = {"median": middle, "least": min(each), "most": max(each)}
            beside = ""
            if floor == "direct" and name != floor:  # what a router adds
                rows[name]["added"] = middle - against
                beside = f"{middle - against:+8.2f}"
            elif against and name != floor:
                rows[name]["ratio"] = middle / against
                beside = f"{middle / against:6.2f} × {floor}"
            print(f"  {name:12} {middle:9.2f}  ({min(each):.2f}-{max(each):.2f})  {beside}")


async def measure(found: list[Router], options: argparse.Namespace) -> Figures:
    figures = Figures()
    own = found[-1]
    starts = {one.name: [one.start_seconds] for one in found[1:]}
    figures.add("Start until it accepts connections, s", starts, floor="")
    for one in found:
        await load(one, CONNECTIONS, 1.0)  # to warm up
    grown = await growth(own, options.streams)  # first: what was used once is kept
    await measure_cpu(found[1:], options, figures)
    await measure_times(found, options, figures)
    figures.add("Memory per 1,000 open streams, MiB", {own.name: [grown * 1000 / options.streams]})
    if options.queued:
        costs = await queue_costs(found[0], own, options.queued)
        title = f"CPU per request while {options.queued} of {QUEUE_USERS} users' wait, µs"
        figures.add(title, costs, floor="nobody waits")
    return figures


async def measure_cpu(found: list[Router], options: argparse.Namespace, figures: Figures) -> None:
    small: dict[str, list[float]] = {one.name: [] for one in found}
    large: dict[str, list[float]] = {one.name: [] for one in found}
    events: dict[str, list[float]] = {one.name: [] for one in found}
    for _ in range(options.rounds):
        for one in found:
            before = one.cpu_seconds()
            count, _ = await load(one, CONNECTIONS, options.seconds)
            small[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
            before = one.cpu_seconds()
            count, _ = await load(one, LARGE_CONNECTIONS, options.seconds, prompt_bytes=LARGE)
            large[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
    for _ in range(max(1, options.rounds // 2)):
        for one in found:
            before = one.cpu_seconds()
            count, _ = await load(one, options.streams, 0.0, stream=True)
            events[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
    figures.add("CPU per request, µs", small)
    figures.add("CPU per request with a prompt of 400 KB, µs", large)
    figures.add(f"CPU per event of {options.streams} streams, µs", events)


async def measure_times(found: list[Router], options: argparse.Namespace, figures: Figures) -> None:
    took: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    for one in found:
        _, seconds = await load(one, 1, options.seconds)
        took[one.name] = [seconds[len(seconds) // 2] * 1e3]
        if options.crowd:
            _, seconds = await load(one, options.crowd, 0.0, stream=True)
            late[one.name] = [seconds[len(seconds) * 99 // 100] * 1e3]
    figures.add("Time of a request at one connection, p50, ms", took, floor="direct")
    if late:
        title = f"Delay of an event of {options.crowd} streams, p99, ms"
        figures.add(title, late, floor="direct")


async def growth(one: Router, streams: int) -> float:
    """MiB more than before while so many streams are open."""
    before = one.resident_mib()
    running = asyncio.create_task(load(one, streams, 0.0, stream=True))
    await asyncio.sleep(EVENTS * PACE / 2)
    grown = one.resident_mib() - before
    await running
    return grown


async def queue_costs(stub: Router, own: Router, jobs: int) -> dict[str, list[float]]:
    """CPU per request when so many wait at once, and when never more come than have a slot.

    Each is on a connection of its own, whose cost is in both figures.
    """
    messages = [request(key_of(n % QUEUE_USERS), "queued-model") for n in range(jobs)]
    slots = asyncio.Semaphore(QUEUE_SLOTS // 2)

    async def in_turn(message: bytes) -> None:
        async with slots:
            await ask_once(own, message)

    before = own.cpu_seconds()
    await asyncio.gather(*map(in_turn, messages))
    alone = own.cpu_seconds() - before
    await ask_once(stub, b"GET /hold HTTP/1.1\r\nhost: stub" + END)
    before = own.cpu_seconds()
    waiting = [asyncio.create_task(ask_once(own, message)) for message in messages]
    await until_still(own)
    await ask_once(stub, b"GET /release HTTP/1.1\r\nhost: stub" + END)
    await asyncio.gather(*waiting)
    queued = own.cpu_seconds() - before
    return {"nobody waits": [alone * 1e6 / jobs], "queued": [queued * 1e6 / jobs]}


async def until_still(one: Router) -> None:
    """Until it does no more than it does when nothing comes."""
    while True:
        before = one.cpu_seconds()
        await asyncio.sleep(1.0)
        if one.cpu_seconds() - before < 0.1:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--crowd", type=int, default=1000, help="streams to measure delays with")
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--peers", type=Path, help="other routers: see bench/README.md")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder, routers(Path(folder), options.peers) as found:
        figures = uvloop.run(measure(found, options))
    if options.json:
        options.json.write_text(json.dumps(figures.found, indent=2))


if __name__ == "__main__":
    main()
