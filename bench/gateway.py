"""What a request, and a relayed event of a stream, cost the gateway in CPU, beside nginx.

    .venv/bin/python bench/gateway.py [--seconds 2] [--rounds 5] [--streams 200]

The real gateway runs on core 0 with a database of its own, and nginx, where it is installed, as
a plain proxy that does nothing else; the stub backend and the load run on core 1. CPU is that of
the router's processes alone, user and system, by the kernel's own count. The routers take turns
within one run, since a machine that is busy or throttled is so for all of them: the ratios say
more than the figures. A request is 0.5 KB and its answer 1 KB, 64 connections at a time; a
stream's events have 0.2 KB and come each 50 ms. A large prompt has 400 KB, 8 connections at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

ROOT = Path(__file__).parent.parent
KEY = "mr-" + "0123456789abcdef" * 4
ROUTER_CORE, LOAD_CORE = 0, 1
CONNECTIONS, EVENTS, PACE = 64, 200, 0.05
SMALL, LARGE = 400, 400_000  # bytes of prompt
LARGE_CONNECTIONS = 8
END = b"\r\n\r\n"

ANSWER = (
    b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":'
    b'{"role":"assistant","content":"%b"}}],"usage":{"prompt_tokens":9,"completion_tokens":9}}'
) % (b"y" * 850)
EVENT = (
    b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"finish_reason":null,'
    b'"delta":{"content":"%b"}}]}\n\n'
) % (b"z" * 80)
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
users: [{{username: bench, group: faculty}}]
api_keys: [{{user: bench, name: bench, key: "{key}"}}]
backends:
  - name: stub
    base_url: "http://127.0.0.1:{stub}"
    max_concurrent: 5000
    max_queue: 5000
    models: [{{name: bench-model}}]
"""


class Stub(asyncio.Protocol):
    """Answers each request, with a stream if it asks for one."""

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
        if b'"stream":true' in body:
            self.transport.write(STREAM_HEAD)
            asyncio.get_running_loop().call_later(PACE, self._event, EVENTS)
        else:
            self.transport.write(PLAIN_HEAD % len(ANSWER) + ANSWER)

    def _event(self, left: int) -> None:
        if self.transport.is_closing():
            return
        data = EVENT if left else LAST
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) + (b"" if left else b"0" + END))
        if left:
            asyncio.get_running_loop().call_later(PACE, self._event, left - 1)


class Asking(asyncio.Protocol):
    """One connection of the load: requests one after the other, or one stream."""

    def __init__(self, *, stream: bool, until: float, prompt_bytes: int) -> None:
        self.request = _request(stream, prompt_bytes)
        self.stream = stream
        self.until = until
        self.done = 0  # answers, or events
        self.buffer = b""
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.stream:
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
        if time.monotonic() < self.until:
            self.transport.write(self.request)
        else:
            self._end()

    def _count_events(self) -> None:
        if self.buffer.endswith(b"0" + END):
            self.done = self.buffer.count(b"data: {") - 1  # the usage may be hidden
            wanted = self.buffer.count(EVENT) == EVENTS and b"data: [DONE]" in self.buffer
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


def _request(stream: bool, prompt_bytes: int) -> bytes:
    body = b'{"model":"bench-model","stream":%b,"messages":[{"role":"user","content":"%b"}]}' % (
        b"true" if stream else b"false",
        b"x" * prompt_bytes,
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d%b%b"
    ) % (KEY.encode(), len(body), END, body)


async def load(
    port: int, connections: int, seconds: float, *, stream: bool, prompt_bytes: int = SMALL
) -> int:
    """How many answers, or events, have come. Raises: RuntimeError for any other answer."""
    loop = asyncio.get_running_loop()
    until = time.monotonic() + seconds
    asking: list[Asking] = []
    for _ in range(connections):
        _, protocol = await loop.create_connection(
            lambda: Asking(stream=stream, until=until, prompt_bytes=prompt_bytes),
            "127.0.0.1",
            port,
        )
        asking.append(protocol)
    return sum(await asyncio.gather(*(one.over for one in asking)))


# ---- the processes


@dataclass(slots=True)
class Router:
    name: str
    port: int
    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> float:
        """Of the process, its children and all their threads."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        total = 0
        for pid in (self.process.pid, *map(int, children.split())):
            for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                total += int(stat.read_text().split()[0])
        return total / 1e9

    def resident_mib(self) -> float:
        """Of the process alone: nginx's worker is a child, and is passed over."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
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
def router(name: str, port: int, command: list[str], env: dict[str, str]) -> Iterator[Router]:
    """A running router on its core."""
    pinned = ["taskset", "-c", str(ROUTER_CORE), *command]
    with subprocess.Popen(pinned, cwd=ROOT, env={**os.environ, **env}) as process:
        try:
            wait_for(port, process)
            yield Router(name, port, process)
        finally:
            process.terminate()


def wait_for(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    for _ in range(300):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"nothing listens at port {port}")


@contextmanager
def routers(folder: Path) -> Iterator[list[Router]]:
    """The stub and all that is measured before it."""
    stub = free_port()
    backend = multiprocessing.get_context("spawn").Process(target=serve_stub, args=(stub,))
    backend.start()
    try:
        wait_for(stub)
        with ExitStack() as running:
            found = []
            if nginx := shutil.which("nginx"):
                port, file = free_port(), folder / "nginx.conf"
                file.write_text(NGINX.format(folder=folder, stub=stub, port=port))
                command = [nginx, "-c", str(file), "-p", str(folder)]
                found.append(running.enter_context(router("nginx", port, command, {})))
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
    setup.write_text(SETUP.format(key=KEY, stub=stub))
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


# ---- measuring


async def measure(found: list[Router], options: argparse.Namespace) -> None:
    requests: dict[str, list[float]] = {one.name: [] for one in found}
    prompts: dict[str, list[float]] = {one.name: [] for one in found}
    events: dict[str, list[float]] = {one.name: [] for one in found}
    for one in found:
        await load(one.port, CONNECTIONS, 1.0, stream=False)  # to warm up
    grown = await growth(found[-1], options.streams)  # first: what was used once is kept
    for _ in range(options.rounds):
        for one in found:
            before = one.cpu_seconds()
            count = await load(one.port, CONNECTIONS, options.seconds, stream=False)
            requests[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
            before = one.cpu_seconds()
            count = await load(
                one.port, LARGE_CONNECTIONS, options.seconds, stream=False, prompt_bytes=LARGE
            )
            prompts[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
    for _ in range(max(1, options.rounds // 2)):
        for one in found:
            before = one.cpu_seconds()
            count = await load(one.port, options.streams, 0.0, stream=True)
            events[one.name].append((one.cpu_seconds() - before) * 1e6 / count)
    report("CPU per request, µs", requests)
    report("CPU per request with a prompt of 400 KB, µs", prompts)
    report(f"CPU per event of {options.streams} streams, µs", events)
    print(f"Memory per 1,000 open streams: {grown / options.streams * 1000:.1f} MiB")


async def growth(one: Router, streams: int) -> float:
    """MiB more than before while so many streams are open."""
    before = one.resident_mib()
    running = asyncio.create_task(load(one.port, streams, 0.0, stream=True))
    await asyncio.sleep(EVENTS * PACE / 2)
    grown = one.resident_mib() - before
    await running
    return grown


def report(title: str, figures: dict[str, list[float]]) -> None:
    print(title)
    for name, values in figures.items():
        middle = statistics.median(values)
        against = statistics.median(figures["nginx"]) if "nginx" in figures else 0.0
        ratio = f"{middle / against:6.2f} × nginx" if against and name != "nginx" else ""
        print(f"  {name:12} {middle:8.1f}  ({min(values):.1f}-{max(values):.1f})  {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=200)
    options = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder, routers(Path(folder)) as found:
        uvloop.run(measure(found, options))


if __name__ == "__main__":
    main()
