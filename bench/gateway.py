"""What a request, and a relayed event of a stream, cost the gateway, beside nginx and others.

    .venv/bin/python -m bench.gateway [--passes 5] [--peers bench/peers.toml] [--only NAME …]
        [--router NAME URL KEY COMMAND] [--phases …] [--json FILE] [--chart FILE.svg]

The routers run on core 0, two backends and the load on core 1; they take turns within each pass,
and the median of the passes counts. CPU is that of all of a router's processes, user and system, by
the kernel's own count. How to read it is in bench/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench.figures import Figures, Kind
from bench.open_pages import OpenPages
from bench.servers import (
    OURS,
    PASSWORD,
    QUEUE_SLOTS,
    Router,
    backends,
    favoured,
    key_of,
    read_peers,
    routers,
)
from bench.traffic import (
    END,
    EVENTS,
    LARGE,
    LOAD_CORE,
    PACE,
    Seen,
    ask_once,
    load,
    request,
)

CONNECTIONS, LARGE_CONNECTIONS = 64, 8
QUEUE_USERS = 1000

REQUEST = Kind(f"CPU per request, {CONNECTIONS} connections, µs", "ratio")
BUSY = Kind(f"core used with {CONNECTIONS} connections, %", digits=0)
RATE = Kind(f"requests per second, {CONNECTIONS} connections", digits=0)
LARGE_REQUEST = Kind(
    f"CPU per request, 400 KB prompt, {LARGE_CONNECTIONS} connections, µs", "ratio"
)
EVENT = Kind("CPU per event, streams × 50 ms, µs", "ratio")
DELAY = Kind("delay of an event, p99, ms", "added")
CROWD_EVENT = Kind("CPU per event, more streams, µs", "ratio")
CROWD_DELAY = Kind("delay of an event of more streams, p99, ms", "added")
ONE = Kind("time of a request, 1 connection, p50, ms", "added", digits=2)
MEMORY = Kind("memory for 1,000 open streams, MiB")
QUEUED = Kind("CPU per request while the queue is long, µs")
UNQUEUED = Kind("CPU per request when nobody waits, µs")
PAGES_DELAY = Kind("delay of an event while pages are open, p99, ms")
PAGES_NONE = Kind("delay of an event while none is, p99, ms")
PAGES_CPU = Kind("CPU of a page's request, ms")
START = Kind("start until it accepts connections, s", digits=2)
KINDS = (
    REQUEST, BUSY, RATE, LARGE_REQUEST, ONE, EVENT, DELAY, CROWD_EVENT, CROWD_DELAY, MEMORY,
    QUEUED, UNQUEUED, PAGES_DELAY, PAGES_NONE, PAGES_CPU, START,
)  # fmt: skip


class Bench:
    """One run: all phases, pass by pass."""

    def __init__(self, found: list[Router], options: argparse.Namespace) -> None:
        self.found = found
        self.options = options
        self.figures = Figures(KINDS)
        self.own = found[-1]

    async def run(self) -> Figures:
        for one in self.found:
            await load(one.port, request(one.key), CONNECTIONS, 1.0)  # to warm up
            if one.process is not None:
                self.figures.add(START, one.name, one.start_seconds)
        for number in range(self.options.passes):
            print(f"pass {number + 1} of {self.options.passes}", file=sys.stderr, flush=True)
            for name in self.options.phases:
                if number == 0 or name not in ONCE:
                    await PHASES[name](self)
        return self.figures

    async def _each(self, measure: Callable[[Router], Awaitable[None]]) -> None:
        for one in self.found:
            await measure(one)

    async def _load(
        self, one: Router, message: bytes, connections: int, seconds: float = 0.0
    ) -> tuple[Seen, float, float]:
        """What was seen, the router's CPU and the wall time, in seconds."""
        cpu, began = one.cpu_seconds(), time.monotonic()
        seen = await load(one.port, message, connections, seconds)
        wall = time.monotonic() - began
        self.figures.complain(one.name, seen.wrong)
        return seen, one.cpu_seconds() - cpu, wall

    def _add_cost(self, kind: Kind, one: Router, cpu: float, count: int) -> None:
        if one.process is not None and count:
            self.figures.add(kind, one.name, cpu * 1e6 / count)

    async def requests(self) -> None:
        async def measure(one: Router) -> None:
            message, seconds = request(one.key), self.options.seconds
            seen, cpu, wall = await self._load(one, message, CONNECTIONS, seconds)
            self._add_cost(REQUEST, one, cpu, seen.count)
            if one.process is not None:
                self.figures.add(BUSY, one.name, cpu / wall * 100)
            self.figures.add(RATE, one.name, seen.count / wall)

        await self._each(measure)

    async def prompts(self) -> None:
        async def measure(one: Router) -> None:
            message, seconds = request(one.key, prompt_bytes=LARGE), self.options.seconds
            seen, cpu, _ = await self._load(one, message, LARGE_CONNECTIONS, seconds)
            self._add_cost(LARGE_REQUEST, one, cpu, seen.count)

        await self._each(measure)

    async def one(self) -> None:
        async def measure(one: Router) -> None:
            seen, _, _ = await self._load(one, request(one.key), 1, self.options.seconds)
            self.figures.add(ONE, one.name, seen.percentile(0.5))

        await self._each(measure)

    async def streams(self) -> None:
        await self._streams(self.options.streams, EVENT, DELAY)

    async def crowd(self) -> None:
        await self._streams(self.options.crowd, CROWD_EVENT, CROWD_DELAY)

    async def _streams(self, number: int, cost: Kind, delay: Kind) -> None:
        async def measure(one: Router) -> None:
            seen, cpu, _ = await self._load(one, request(one.key, stream=True), number)
            self._add_cost(cost, one, cpu, seen.count)
            self.figures.add(delay, one.name, seen.percentile(0.99))

        await self._each(measure)

    async def memory(self) -> None:
        """What it has more while streams are open."""
        before, number = self.own.resident_mib(), self.options.streams
        message = request(self.own.key, stream=True)
        running = asyncio.create_task(load(self.own.port, message, number, 0.0))
        await asyncio.sleep(EVENTS * PACE / 2)
        grown = self.own.resident_mib() - before
        await running
        self.figures.add(MEMORY, OURS, grown * 1000 / number)

    async def queue(self) -> None:
        """CPU per request when so many wait at once, and when never more come than have a slot.

        Each is on a connection of its own, whose cost is in both figures.
        """
        jobs, port = self.options.queued, self.own.port
        messages = [request(key_of(n % QUEUE_USERS), "queued-model") for n in range(jobs)]
        slots = asyncio.Semaphore(QUEUE_SLOTS // 2)

        async def in_turn(message: bytes) -> None:
            async with slots:
                await ask_once(port, message)

        before = self.own.cpu_seconds()
        await asyncio.gather(*map(in_turn, messages))
        self._add_cost(UNQUEUED, self.own, self.own.cpu_seconds() - before, jobs)
        backend = self.found[0].port
        await ask_once(backend, b"GET /hold HTTP/1.1\r\nhost: stub" + END)
        before = self.own.cpu_seconds()
        waiting = [asyncio.create_task(ask_once(port, message)) for message in messages]
        await self._until_still()
        await ask_once(backend, b"GET /release HTTP/1.1\r\nhost: stub" + END)
        await asyncio.gather(*waiting)
        self._add_cost(QUEUED, self.own, self.own.cpu_seconds() - before, jobs)

    async def _until_still(self) -> None:
        """Until it does no more than it does when nothing comes."""
        while True:
            before = self.own.cpu_seconds()
            await asyncio.sleep(1.0)
            if self.own.cpu_seconds() - before < 0.1:
                return

    async def pages(self) -> None:
        """Delays of events while people have the admin's pages open, and while nobody has."""
        message, number = request(self.own.key, stream=True), self.options.page_streams
        seen, alone, _ = await self._load(self.own, message, number)
        self.figures.add(PAGES_NONE, OURS, seen.percentile(0.99))
        async with OpenPages(self.own.port, "root", PASSWORD, self.options.readers) as opened:
            seen, cpu, _ = await self._load(self.own, message, number)
        self.figures.add(PAGES_DELAY, OURS, seen.percentile(0.99))
        self.figures.complain(OURS, opened.wrong)
        if opened.count:
            self.figures.add(PAGES_CPU, OURS, (cpu - alone) * 1e3 / opened.count)


PHASES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "memory": Bench.memory,
    "requests": Bench.requests,
    "prompts": Bench.prompts,
    "one": Bench.one,
    "streams": Bench.streams,
    "crowd": Bench.crowd,
    "queue": Bench.queue,
    "pages": Bench.pages,
}
#: In the first pass only: what was used once is kept, and ten thousand connections take their time.
ONCE = ("memory", "queue")


def main() -> None:
    options = arguments()
    os.sched_setaffinity(0, {LOAD_CORE})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    peers = read_peers(options.peers) if options.peers else []
    if options.only is not None:
        peers = [one for one in peers if one["name"] in options.only]
    names = ("name", "url", "key", "start")
    peers += [dict(zip(names, one, strict=True)) for one in options.router]
    users = QUEUE_USERS if "queue" in options.phases else 0
    with (
        favoured(),
        tempfile.TemporaryDirectory() as folder,
        backends() as ports,
        routers(Path(folder), peers, ports, users) as found,
    ):
        figures = uvloop.run(Bench(found, options).run())
    print(figures.table())
    for name, what in figures.wrong.items():
        if what:
            print(f"{name}: {what[0]}")
    if options.json:
        options.json.write_text(json.dumps(figures.rows(), indent=1, ensure_ascii=False))
    if options.chart:
        options.chart.write_text(figures.chart())
    sys.exit(bool(figures.wrong.get(OURS)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--crowd", type=int, default=1000, help="streams to measure delays with")
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--page-streams", type=int, default=200)
    parser.add_argument("--readers", type=int, default=3, help="people with pages open")
    parser.add_argument("--peers", type=Path, help="other routers, a table each: bench/peers.toml")
    parser.add_argument("--only", nargs="*", help="the names of those of them to measure")
    parser.add_argument(
        "--router",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "URL", "KEY", "COMMAND"),
        help="another router",
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--chart", type=Path, help="a file for a chart, in SVG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
