"""What the relay's client costs in CPU, beside httpx doing the same in the same run.

    .venv/bin/python bench/upstream.py [--seconds 3] [--loop uvloop|asyncio] [--without-httpx]

A stub server runs in a process of its own; CPU is this process's alone (user and system), so it
includes the kernel's share of receiving and sending. Requests: a 500-byte body, a 1 KB answer,
16 at a time. Paced chunks: 100 streams with an event of about 190 bytes each 20 ms. Burst chunks:
as many as fit, so that one read carries dozens. "Python" is the floor taken off: the same bytes
received by a protocol that only counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from backends.upstream import Origin, Upstream

BODY = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 450)
ANSWER = b'{"choices":[{"message":{"content":"%b"}}]}' % (b"y" * 1000)
EVENT = b'data: {"id":"c1","choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"z" * 135)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CONCURRENT, STREAMS, PACE = 16, 100, 0.02
LIMITS = {"connect_timeout": 5.0, "first_byte_timeout": 600.0, "chunk_timeout": 120.0}


class Stub(asyncio.Protocol):
    """Answers by path: /json, /paced/N or /burst/N (N chunks)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.buffer[:end].lower()
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.buffer) < end + 4 + size:
            return
        self.buffer = b""
        _, kind, *count = head.split(b" ", 2)[1].split(b"/")
        if kind == b"json":
            self.transport.write(LENGTH_HEAD % len(ANSWER) + ANSWER)
        elif kind == b"burst":
            self.transport.write(STREAM_HEAD + CHUNK * int(count[0]) + b"0\r\n\r\n")
        else:
            self.transport.write(STREAM_HEAD)
            self.tick(int(count[0]))

    def tick(self, left: int) -> None:
        if left == 0:
            self.transport.write(b"0\r\n\r\n")
        elif not self.transport.is_closing():
            self.transport.write(CHUNK)
            asyncio.get_running_loop().call_later(PACE, self.tick, left - 1)


def serve(listener: socket.socket) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Stub, sock=listener, backlog=4096)
        await server.serve_forever()

    uvloop.run(main())


class Count(asyncio.Protocol):
    """The floor: receives and counts."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self.request, self.done, self.seen = request, done, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        self.seen += len(data)
        if data.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(self.seen)


Fetch = Callable[[str], Awaitable[int]]


def own_client(port: int) -> tuple[Fetch, Callable[[], Awaitable[None]]]:
    pool, origin = Upstream(), Origin.parse(f"http://127.0.0.1:{port}")
    headers = b"content-type: application/json\r\nauthorization: Bearer k\r\n"

    async def fetch(path: str) -> int:
        size = 0
        response = await pool.send(
            origin, method=b"POST", path=path.encode(), headers=headers, body=BODY, **LIMITS
        )
        with response:
            while part := await response.read():
                size += len(part)
        return size

    return fetch, pool.close


def httpx_client(port: int) -> tuple[Fetch, Callable[[], Awaitable[None]]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=600)

    async def fetch(path: str) -> int:
        size = 0
        async with client.stream("POST", path, content=BODY) as response:
            async for part in response.aiter_raw():
                size += len(part)
        return size

    return fetch, client.aclose


def floor_client(port: int) -> tuple[Fetch, Callable[[], Awaitable[None]]]:
    async def fetch(path: str) -> int:
        loop = asyncio.get_running_loop()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % path.encode()
        done = loop.create_future()
        transport, _ = await loop.create_connection(lambda: Count(head, done), "127.0.0.1", port)
        size = await done
        transport.close()
        return cast("int", size)

    async def close() -> None:
        pass

    return fetch, close


async def repeat(fetch: Fetch, path: str, expected: int, until: float) -> int:
    count = 0
    while time.monotonic() < until:
        if await fetch(path) != expected:
            raise AssertionError("the answer is not whole")
        count += 1
    return count


async def requests(fetch: Fetch, seconds: float) -> dict[str, float]:
    await asyncio.gather(*(fetch("/json") for _ in range(CONCURRENT)))
    cpu, wall = time.process_time(), time.monotonic()
    until = wall + seconds
    counts = await asyncio.gather(
        *(repeat(fetch, "/json", len(ANSWER), until) for _ in range(CONCURRENT))
    )
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {"µs/request": cpu / sum(counts) * 1e6, "requests/s": sum(counts) / wall}


async def paced(fetch: Fetch, seconds: float) -> dict[str, float]:
    each = int(seconds / PACE)
    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.gather(*(fetch(f"/paced/{each}") for _ in range(STREAMS)))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {"µs/chunk": cpu / (each * STREAMS) * 1e6, "chunks/s": each * STREAMS / wall}


async def burst(fetch: Fetch, seconds: float) -> dict[str, float]:
    each = 5000
    until = time.monotonic() + seconds
    cpu = time.process_time()
    counts = await asyncio.gather(
        *(repeat(fetch, f"/burst/{each}", each * len(EVENT), until) for _ in range(4))
    )
    cpu = time.process_time() - cpu
    return {"µs/chunk": cpu / (each * sum(counts)) * 1e6}


def run(make: Callable[[int], Any], port: int, kind: Any, args: argparse.Namespace) -> Any:
    async def main() -> Any:
        fetch, close = make(port)
        try:
            return await kind(fetch, args.seconds)
        finally:
            await close()

    factory = uvloop.new_event_loop if args.loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--without-httpx", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    stub = multiprocessing.get_context("fork").Process(target=serve, args=(listener,), daemon=True)
    stub.start()
    clients = {"own": own_client} | ({} if args.without_httpx else {"httpx": httpx_client})
    results: dict[str, dict[str, Any]] = {}
    for name, make in clients.items():
        results[name] = {
            "requests": run(make, port, requests, args),
            "paced": run(make, port, paced, args),
            "burst": run(make, port, burst, args),
        }
    results["floor"] = {"paced": run(floor_client, port, paced, args)}
    stub.terminate()
    stub.join()
    print(json.dumps(results, indent=1) if args.json else table(results))


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for kind, unit in (("requests", "µs/request"), ("paced", "µs/chunk"), ("burst", "µs/chunk")):
        own = results["own"][kind][unit]
        parts = [f"{kind:9}own {own:8.2f} {unit}"]
        if "httpx" in results:
            other = results["httpx"][kind][unit]
            parts.append(f"httpx {other:8.2f} ({other / own:.1f} times)")
        if kind == "paced":
            floor = results["floor"][kind][unit]
            parts.append(f"floor {floor:.2f}, so Python {own - floor:.2f}")
        lines.append("   ".join(parts))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
