"""Two gateways and one scheduler over Redis: shares, what the bus costs, and what kills do.

    .venv/bin/python -m bench.cluster [--seconds 8] [--rate 200] [--streams 200] [--json FILE]
                                      [--only NAME …]

Each figure is told with what is wanted of it and whether that is met; with --json all of them go
into a file as well. Real processes on loopback: PostgreSQL, redis-server, two schedulers of which
one stands by, two gateways, a gateway that schedules by itself for comparison, and a stub backend
that counts what runs on it.
CPU is that of a process, user and system, by the kernel's own count; it is the sound figure on a
machine that does other things as well. Nothing is pinned: with two cores and six processes the
rates say little. As root all of them come before other work on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.decisions import call_ns
from bench.servers import KEY as BENCH_KEY
from bench.servers import ROOT, favour, favoured, free_port, wait_for
from bench.traffic import ANSWER as PLAIN
from bench.traffic import load, request
from tests.scheduler.postgres import postgresql

SLOTS = 8
WEIGHTS = {"third": 3, "second": 2, "first": 1}
KEYS = {name: "mr-" + f"{number:064x}" for number, name in enumerate(WEIGHTS, start=1)}
OUTPUT = {"third": 400, "second": 100, "first": 200}  # tokens of an answer
SETUP = """
groups: [{groups}]
users: [{users}, {{username: bench, group: first}}, {{username: root, is_staff: true}}]
api_keys: [{keys}, {{user: bench, name: b, key: "{bench}"}}, {{user: root, name: r, key: "{root}"}}]
backends:
  - {{name: counted, base_url: "http://127.0.0.1:{stub}", max_concurrent: {slots}, max_queue: 5000,
      models: [{{name: counted}}]}}
  - {{name: roomy, base_url: "http://127.0.0.1:{stub}", max_concurrent: 5000, max_queue: 5000,
      models: [{{name: bench-model}}]}}
"""
ROOT_KEY = "mr-" + "f" * 64
ANSWER = b'{"choices":[{"index":0,"finish_reason":"stop","message":{"content":"Hi"}}],"usage":%b}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n'
)


# ---- what is told


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    wanted: str  # empty: nothing is
    met: bool | None


class Report:
    """Figures, printed as they come."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def at_most(self, bound: float, name: str, value: float, unit: str = "") -> None:
        self._add(Figure(name, value, unit, f"≤ {bound:g}", value <= bound))

    def at_least(self, bound: float, name: str, value: float, unit: str = "") -> None:
        self._add(Figure(name, value, unit, f"≥ {bound:g}", value >= bound))

    def near(self, aim: float, by: float, name: str, value: float, unit: str = "") -> None:
        self._add(Figure(name, value, unit, f"{aim:.4g} ± {by:g}", abs(value - aim) <= by))

    def note(self, name: str, value: float, unit: str = "") -> None:
        self._add(Figure(name, value, unit, "", None))

    def _add(self, one: Figure) -> None:
        self.figures.append(one)
        verdict = {None: "", True: "met", False: "MISSED"}[one.met]
        print(
            f"  {one.name:62} {one.value:10.6g} {one.unit:10} {one.wanted:12} {verdict}", flush=True
        )

    def document(self) -> dict[str, Any]:
        figures = [asdict(one) for one in self.figures]
        return {"missed": sum(one.met is False for one in self.figures), "figures": figures}


# ---- the backend


@dataclass
class Stub:
    """Answers after 30 ms, streams until told to end, and counts."""

    port: int = 0
    running: Counter[str] = field(default_factory=Counter)  # by model
    most: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # of all answers that ended
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                body = json.loads(await reader.readexactly(int(size or 0)) or b"{}")
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                    continue
                model = body["model"]
                self.running[model] += 1
                self.most[model] = max(self.most[model], self.running[model])
                try:
                    await self._answer(writer, body)
                finally:
                    self.running[model] -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if body.get("stream"):
            await self._stream(writer)
            return
        if body["model"] == "counted":
            await asyncio.sleep(0.03)
            data = ANSWER % self._used(10, body["max_tokens"])
        else:
            self._used(120, 128)  # as it says
            data = PLAIN
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        said = 0
        while not self.over.is_set() and not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            said += 1
            await asyncio.sleep(0.1)
        if writer.is_closing():
            return
        last = LAST % self._used(10, said)
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    def _used(self, prompt: int, output: int) -> bytes:
        self.tokens += prompt + output
        return json.dumps({"prompt_tokens": prompt, "completion_tokens": output}).encode()


# ---- the clients


@dataclass(frozen=True)
class Answer:
    status: int  # 0: the connection broke
    text: bytes
    seconds: float
    at: float


async def ask(port: int, key: str, path: str = "/v1/chat/completions", **body: Any) -> Answer:
    """One request on a connection of its own."""
    began = time.monotonic()
    data = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **body}).encode()
    method = "POST" if body else "GET"
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
        f"connection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data) if body else 0}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + (data if body else b""))
        text = await reader.read()
        writer.close()
    except OSError:
        text = b""
    status = int(text[9:12]) if text[:9] == b"HTTP/1.1 " else 0
    now = time.monotonic()
    return Answer(status, text, now - began, now)


def document(answer: Answer) -> Any:
    """The JSON of an answer, whichever way it was framed."""
    body = answer.text.partition(b"\r\n\r\n")[2]
    return json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])


# ---- the processes


class Process:
    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self._command, self._env, self._log = name, command, env, log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            env = {**os.environ, **self._env}
            process = subprocess.Popen(
                self._command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )
        favour(process.pid)
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()

    def cpu_seconds(self) -> float:
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9

    def last_epoch(self) -> int:
        """The epoch in which it last led; 0: never."""
        _, found, last = self._log.read_text().rpartition("Leading in epoch ")
        return int(last.split()[0]) if found else 0


@dataclass
class Site:
    stub: Stub
    redis: Process
    schedulers: list[Process]
    gateways: list[Process]
    ports: list[int]
    alone: Process  # a gateway that schedules by itself
    alone_port: int
    environment: dict[str, str]

    def leader(self) -> Process:
        """That of the two which has led last."""
        return max(self.schedulers, key=Process.last_epoch)

    async def stats(self) -> Any:
        answer = await ask(self.ports[0], ROOT_KEY, "/api/admin/scheduler/stats")
        return document(answer) if answer.status == 200 else None

    async def in_flight(self) -> int:
        stats = await self.stats()
        return sum(backend["in_flight"] for backend in stats["backends"])

    async def idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits: {user: charged tokens in the window}."""
        while True:
            stats = await self.stats()
            if stats and not any(b["in_flight"] for b in stats["backends"]):
                users = stats["fair_share"]["user_stats"]
                return {user["username"]: user["recent_tokens"] for user in users}
            await asyncio.sleep(0.1)


@contextmanager
def site(folder: Path, stub: Stub) -> Iterator[Site]:
    redis_port = free_port()
    with ExitStack() as started:

        def process(name: str, command: list[str], env: dict[str, str]) -> Process:
            one = Process(name, command, env, folder / f"{name}.log")
            started.callback(one.kill)
            return one

        redis = process(
            "redis",
            ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(folder)],
            {},
        )
        database = started.enter_context(postgresql()).url
        shared = _prepared(folder / "shared", stub.port, database) | {
            "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0"
        }
        manage = [sys.executable, "manage.py"]
        schedulers = [process(f"scheduler{n}", [*manage, "runscheduler"], shared) for n in range(2)]
        ports = [free_port(), free_port()]
        gateways = [
            process(f"gateway{port}", [*manage, "rungateway", "--port", str(port)], shared)
            for port in ports
        ]
        own = _prepared(folder / "own", stub.port, f"sqlite:///{folder}/own.sqlite3")
        port = free_port()
        alone = process("alone", [*manage, "rungateway", "--port", str(port)], own)
        for one in (*ports, port):
            wait_for(one)
        yield Site(stub, redis, schedulers, gateways, ports, alone, port, shared)


def _prepared(folder: Path, stub: int, database: str) -> dict[str, str]:
    """A data folder with the bench's users and backends; the environment to use it."""
    folder.mkdir()
    env = {"MINDROUTER_DATA": str(folder), "DATABASE_URL": database}
    setup = folder / "setup.yaml"
    setup.write_text(
        SETUP.format(
            groups=", ".join(f"{{name: {n}, scheduler_weight: {w}}}" for n, w in WEIGHTS.items()),
            users=", ".join(f"{{username: {name}, group: {name}}}" for name in WEIGHTS),
            keys=", ".join(f'{{user: {n}, name: k, key: "{key}"}}' for n, key in KEYS.items()),
            bench=BENCH_KEY,
            root=ROOT_KEY,
            stub=stub,
            slots=SLOTS,
        )
    )
    for command in (["migrate", "-v0"], ["apply", str(setup)]):
        subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=ROOT,
            env={**os.environ, **env},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return env


# ---- what is measured


async def fairness(site: Site, report: Report, options: argparse.Namespace) -> None:
    """Three users, weights 3:2:1, answers of different lengths, on one gateway and on two."""
    for ports in (site.ports[:1], site.ports):
        tokens = await _tokens_served(site, ports, options.seconds)
        total, over = sum(tokens.values()), f"over {len(ports)} gateway{'s' * (len(ports) - 1)}"
        for name, weight in WEIGHTS.items():
            entitled = 100 * weight / sum(WEIGHTS.values())
            share = 100 * tokens[name] / total
            report.near(entitled, 2.0, f"share of weight {weight} {over}", share, "%")
        report.at_most(SLOTS, f"slots in use at once {over}", site.stub.most["counted"])


async def _tokens_served(site: Site, ports: list[int], seconds: float) -> Counter[str]:
    """Of each user, with 24 requests outstanding for each; the first second is not counted."""
    counted_from = time.monotonic() + 1.0
    until = counted_from + seconds
    tokens: Counter[str] = Counter()

    async def keep_asking(name: str, port: int) -> None:
        while time.monotonic() < until:
            answer = await ask(port, KEYS[name], model="counted", max_tokens=OUTPUT[name])
            if answer.status == 200 and counted_from < answer.at < until:
                tokens[name] += 10 + OUTPUT[name]

    site.stub.most.clear()
    await asyncio.gather(
        *(keep_asking(name, ports[n % len(ports)]) for name in WEIGHTS for n in range(24))
    )
    return tokens


async def bus(site: Site, report: Report, options: argparse.Namespace) -> None:
    """What a request costs through Redis, at one gateway and at two, and in process."""
    kinds = {
        "in process": ([site.alone], [site.alone_port]),
        "over the bus": (site.gateways[:1], site.ports[:1]),
        "two gateways": (site.gateways, site.ports),
    }
    figures: dict[str, list[float]] = {name: [] for name in kinds}
    scheduler: list[float] = []
    for port in (site.alone_port, *site.ports):
        await load(port, request(BENCH_KEY), 16, 0.5)
    for _ in range(5):
        for name, (gateways, ports) in kinds.items():
            processes = [*gateways, site.leader()]
            before = [one.cpu_seconds() for one in processes]
            loads = (load(port, request(BENCH_KEY), 16, options.seconds / 5) for port in ports)
            count = sum(seen.count for seen in await asyncio.gather(*loads))
            *cpu, leading = [
                one.cpu_seconds() - was for one, was in zip(processes, before, strict=True)
            ]
            figures[name].append(sum(cpu) * 1e3 / count)
            if name == "over the bus":
                scheduler.append(leading * 1e3 / count)
    alone, one, two = (statistics.median(figures[name]) for name in kinds)
    wide = "CPU per request at 16 busy connections: "
    report.note("a function call on this machine, for comparison", call_ns(), "ns")
    report.note(wide + "scheduler in process", alone, "ms")
    report.note(wide + "gateway on the bus", one, "ms")
    # In process the scheduler's own work is in it, too: about a fifth (docs/performance.md).
    report.at_most(0.15, wide + "gateway's, for the lease", one - 0.8 * alone, "ms")
    report.note(wide + "scheduler", statistics.median(scheduler), "ms")
    report.near(1.0, 0.1, "CPU per request of two gateways to that of one", two / one, "times")


async def latency(site: Site, report: Report, options: argparse.Namespace) -> None:
    """From asking for a lease to having it, one after the other, beside the same in process."""
    from scheduler.bus.gateway import RemoteRuntime
    from scheduler.core.jobs import Job, Usage
    from scheduler.runtime import Runtime
    from scheduler.serving import Serving

    used = Usage(prompt_tokens=10, completion_tokens=10)

    async def one(serving: Serving, number: int) -> float:
        user_id = next(iter(serving.snapshot.users))
        job = Job(
            request_id=f"{number:032x}", user_id=user_id, unit=user_id, model_name="bench-model"
        )
        began = time.perf_counter()
        with await serving.submit(job) as claim:
            waited = time.perf_counter() - began
            claim.settle(used)
        return waited

    async def many(serving: Serving, numbers: range) -> None:
        for number in numbers:
            await one(serving, number)

    medians = {}
    for kind in (Runtime, RemoteRuntime):
        serving = await kind.start()
        while not getattr(serving, "in_touch", True):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        waits = [await one(serving, number) for number in range(1000)]
        medians[kind] = statistics.median(waits) * 1000
        if kind is RemoteRuntime:
            await _how_many_leases(site, report, serving, many)
        await serving.stop()
    report.at_most(1.5, "a lease, median of 1,000 one by one", medians[RemoteRuntime], "ms")
    report.note("the same in process", medians[Runtime], "ms")


async def _how_many_leases(
    site: Site, report: Report, serving: Any, many: Callable[[Any, range], Awaitable[None]]
) -> None:
    leader, began = site.leader(), time.monotonic()
    before, count = leader.cpu_seconds(), 20_000
    each = count // 200
    await asyncio.gather(
        *(many(serving, range(10**6 + n * each, 10**6 + (n + 1) * each)) for n in range(200))
    )
    cpu, seconds = leader.cpu_seconds() - before, time.monotonic() - began
    report.at_least(
        5000, "leases of a scheduler on a core of its own, by its CPU", count / cpu, "/s"
    )
    report.note("leases seen, beside their one client", count / seconds, "/s")


async def leader_kill(site: Site, report: Report, options: argparse.Namespace) -> None:
    """Streams and a steady rate of requests, while the leader is killed."""
    before, tokens = sum((await site.idle()).values()), site.stub.tokens
    streams = await _streams(site, options.streams)
    answers: list[asyncio.Task[Answer]] = []
    leader, killed_at, began = site.leader(), 0.0, time.monotonic()
    for n in range(round(options.rate * 8)):
        if n == options.rate * 2:
            killed_at = time.monotonic()
            leader.kill()
        port = site.ports[n % 2]
        answers.append(asyncio.create_task(ask(port, BENCH_KEY, model="bench-model", max_tokens=9)))
        await asyncio.sleep(began + (n + 1) / options.rate - time.monotonic())
    done = await asyncio.gather(*answers)
    cut = await _cut(site, streams)
    moments = sorted([killed_at, *(one.at for one in done if one.at > killed_at)])
    gap = max(b - a for a, b in itertools.pairwise(moments))
    charged = sum((await site.idle()).values()) - before
    when = f"leader killed, {options.rate} requests/s, {options.streams} streams: "
    report.note(when + "requests", len(done))
    report.at_most(0, when + "failed", sum(one.status != 200 for one in done))
    report.at_most(0, when + "streams cut", cut)
    report.at_most(3.0, when + "no answer for", gap, "s")
    report.near(site.stub.tokens - tokens, 0.5, when + "tokens charged", charged)
    report.at_most(0, when + "slots left over", await site.in_flight())
    leader.restart()


async def redis_restart(site: Site, report: Report, options: argparse.Namespace) -> None:
    """Redis is killed and, after three seconds, started again with nothing in it."""
    before, tokens = sum((await site.idle()).values()), site.stub.tokens
    streams = await _streams(site, options.streams)
    site.redis.kill()
    killed_at = time.monotonic()
    started_at = 0.0
    answers: list[asyncio.Task[Answer]] = []
    while time.monotonic() < killed_at + 10.0:
        if not started_at and time.monotonic() > killed_at + 3.0:
            site.redis.restart()
            started_at = time.monotonic()
        port = random.choice(site.ports)
        answers.append(asyncio.create_task(ask(port, BENCH_KEY, model="bench-model", max_tokens=9)))
        await asyncio.sleep(0.05)
    done = await asyncio.gather(*answers)
    cut = await _cut(site, streams)
    refused = [one for one in done if one.status != 200]
    charged = sum((await site.idle()).values()) - before
    when = "Redis killed, started empty after 3 s: "
    report.note(when + "requests", len(done))
    report.note(when + "refused with 503", sum(one.status == 503 for one in refused))
    report.at_most(0, when + "failed otherwise", sum(one.status != 503 for one in refused))
    report.at_most(3.0, when + "slowest answer", max(one.seconds for one in done), "s")
    last = max((one.at for one in refused), default=started_at)
    report.at_most(5.0, when + "last refusal after its start", last - started_at, "s")
    report.at_most(0, when + "streams cut", cut)
    report.near(site.stub.tokens - tokens, 0.5, when + "tokens charged", charged)
    report.at_most(0, when + "slots left over", await site.in_flight())


async def gateway_kill(site: Site, report: Report, options: argparse.Namespace) -> None:
    """A gateway dies with half of the streams; its slots are free again after a while."""
    await site.idle()
    streams = await _streams(site, options.streams)
    half = options.streams // 2
    while await site.in_flight() < options.streams:  # noqa: ASYNC110  told a little late
        await asyncio.sleep(0.1)
    site.gateways[1].kill()
    killed_at = time.monotonic()
    while await site.in_flight() > half:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - killed_at
    cut = await _cut(site, streams)
    await site.idle()
    when = f"gateway killed with half of {options.streams} streams: "
    report.at_most(0, when + "other streams cut", cut - half)
    report.at_most(5.0, when + "its slots free after", seconds, "s")
    report.at_most(0, when + "slots left over", await site.in_flight())
    site.gateways[1].restart()
    wait_for(site.ports[1])


async def _streams(site: Site, count: int) -> list[asyncio.Task[Answer]]:
    """So many that run until ``_cut``, on both gateways."""
    site.stub.over.clear()
    streams = [
        asyncio.create_task(ask(site.ports[n % 2], BENCH_KEY, model="bench-model", stream=True))
        for n in range(count)
    ]
    while site.stub.running["bench-model"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return streams


async def _cut(site: Site, streams: list[asyncio.Task[Answer]]) -> int:
    """Let the streams end; how many did not do so whole."""
    site.stub.over.set()
    return sum(b"[DONE]" not in one.text for one in await asyncio.gather(*streams))


MEASURES = {
    one.__name__: one for one in (fairness, bus, latency, leader_kill, gateway_kill, redis_restart)
}


async def measure(folder: Path, options: argparse.Namespace) -> Report:
    stub, report = Stub(), Report()
    await stub.start()
    found = ExitStack()
    running = await asyncio.to_thread(found.enter_context, site(folder, stub))
    try:
        await running.idle()
        await asyncio.to_thread(_set_up_django, running)
        for name in options.only or MEASURES:
            await MEASURES[name](running, report, options)
    finally:
        found.close()
    return report


def _set_up_django(running: Site) -> None:
    os.environ.update(running.environment)
    os.environ["DJANGO_SETTINGS_MODULE"] = "mindrouter.settings"
    import django

    django.setup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=MEASURES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not in the path")
    with tempfile.TemporaryDirectory() as folder, favoured():
        found = uvloop.run(measure(Path(folder), options)).document()
    print(f"{found['missed']} of {len(found['figures'])} figures missed")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
