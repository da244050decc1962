"""Everything at once for minutes or hours; at the end nothing may be lost, leaked or counted twice.

    make soak [MINUTES=2] [SEED=…] [CLUSTER=1]
    python -m bench.soak [--minutes 2] [--seed …] [--cluster]

The real gateway as a process of its own, three scripted backends, and clients of every API surface
who ask, leave, read slowly and come again, while weights and backends are changed, backends die and
come back, and the gateway is stopped and killed. With --cluster it is a whole site on PostgreSQL
and Redis, of which any part is stopped, killed or frozen (``soak_cluster.py``). What each of them
does follows from the seed; the moments at which things meet are the machine's. Ends with a table
and, where a line of it is not as it has to be, with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvloop

if TYPE_CHECKING:
    from bench.soak_cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CLIENTS = 12
USERS = {"ada": 3, "bob": 2, "eve": 1, "kim": 0}
BACKENDS = 3
SETTLING = 60.0  # seconds for everything to end once nobody asks any more
MOST_GROWTH = 40  # MB of RSS from the first minute's end to the last
WAIT = 60.0
#: A request that was killed so soon after its client began to send it may leave no record: some
#: 40 ms after its arrival (docs/design.md), and what a busy machine takes to connect and read it.
UNRECORDED_SECONDS = 0.5
#: What a gateway on a busy machine takes to read what was sent to it.
UNREAD_SECONDS = 0.5
ENVIRONMENT = {
    "BACKEND_FAIL_WINDOW": "0.5",
    "SCHEDULER_MAX_WAIT": "10",
    "QUEUE_KEEPALIVE_AFTER": "0.2",
    "SHUTDOWN_GRACE": "3",
}
Line = tuple[str, Any, bool]  # of the table: what, how much, whether that is right


@dataclass
class Tally:
    """What clients and backends saw; keys are the clients' ids of requests, but for ``told``."""

    seed: int
    sent: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)  # a head at least
    whole: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    left: dict[str, float] = field(default_factory=dict)  # seconds since all of it was sent, or 0
    lost: dict[str, float] = field(default_factory=dict)  # cut with a process; seconds before that
    ends: Counter[str] = field(default_factory=Counter)
    improper: list[str] = field(default_factory=list)
    told: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by the router's ids
    deeds: Counter[str] = field(default_factory=Counter)


class Door:
    """A gateway as its clients see it: a port, and when it went down."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_down = False
        self.downs: list[float] = []
        self.asked: set[str] = set()  # ids of the requests that went there

    def goes_down(self) -> None:
        self.is_down = True
        self.downs.append(time.monotonic())

    def is_up(self) -> None:
        self.is_down = False

    def went_down_since(self, moment: float) -> bool:
        return self.is_down or any(down >= moment for down in self.downs)


async def soak(folder: Path, minutes: float, tally: Tally, cluster: Cluster | None) -> list[Line]:
    from tests.processes import RouterProcess
    from tests.stubs.openai_stub import OpenAIStub

    stubs = [await OpenAIStub.start() for _ in range(BACKENDS)]
    for number, stub in enumerate(stubs):
        stub.behaviour = Backend(random.Random(f"{tally.seed} backend {number}"), tally).answer
    keys = await asyncio.to_thread(make_site, [stub.url for stub in stubs])
    site: Site
    if cluster is None:
        site = Alone(RouterProcess(folder, keys["ada"]), stubs, keys, tally)
    else:
        site = cluster.site(folder, stubs, keys, tally)
    try:
        async with asyncio.timeout(minutes * 60 + 600):
            await site.start()
            return await site.run(minutes * 60)
    finally:
        await site.close()
        for stub in stubs:
            await stub.close()


def make_site(urls: list[str]) -> dict[str, str]:
    """Users with budgets that are never used up, and backends with every model; {user: key}."""
    from django.core.management import call_command
    from django.db import connection

    from tests.factories import make_api_key, make_backend, make_group, make_user

    call_command("migrate", verbosity=0)
    keys = {}
    for name, weight in USERS.items():
        group = make_group(name, scheduler_weight=weight, token_budget=10**12)
        group.budget_period = "month"
        group.save()
        keys[name] = make_api_key(make_user(name, group=group))
    keys["root"] = make_api_key(make_user("root", is_staff=True, is_superuser=True))
    for number, url in enumerate(urls):
        make_backend(
            f"b{number}", models=("m",), base_url=url, engine="sglang", max_concurrent=3,
            max_queue=40, first_byte_timeout=5, chunk_timeout=5,
        )  # fmt: skip
    connection.close()
    return keys


class Backend:
    """Answers in any way that a server on a network can."""

    def __init__(self, dice: random.Random, tally: Tally) -> None:
        self.dice, self.tally = dice, tally

    async def answer(self, call: Any) -> None:
        from tests.faults.surfaces import SURFACES
        from tests.faults.test_everything_at_once import FAULTS
        from tests.stubs.openai_stub import drip, ordinary

        own = call.headers["x-request-id"]
        told = self.tally.told.setdefault(own, [])
        if call.path == "/v1/chat/completions" and call.is_stream and self.dice.random() < 0.4:
            count = self.dice.randrange(1, 60)
            told.append((call.stub.prompt_tokens, count))
            await drip(0.02, count)(call)
        elif self.dice.random() < 0.8:
            proper = next((s.answer for s in SURFACES if s.path == call.path), ordinary)
            await proper(call)
            if proper is ordinary:
                words = 0 if call.path.endswith("/embeddings") else len(call.stub.words)
                told.append((call.stub.prompt_tokens, words))
        else:
            await self.dice.choice(FAULTS)(call)


class Site(ABC):
    """Clients, trouble and the end's table; of which processes it is made say others."""

    def __init__(self, stubs: list[Any], keys: dict[str, str], tally: Tally) -> None:
        self.stubs, self.keys, self.tally = stubs, keys, tally
        self.doors: list[Door] = []
        self.rss: dict[str, list[tuple[float, float]]] = {}  # {process: (when, MB)}

    @abstractmethod
    async def start(self) -> None:
        """Have all processes serve."""

    @abstractmethod
    async def close(self) -> None:
        """End them all."""

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """{name: number} of the processes that are to stay as they are."""

    @abstractmethod
    async def troubles(self, until: float) -> None:
        """Stop and kill, until then."""

    def others(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on all the time."""
        return [self.admin(), self.deaths()]

    @abstractmethod
    async def get(self, path: str, key: str) -> Any:
        """The document at an address of a gateway."""

    async def run(self, seconds: float) -> list[Line]:
        before, began = self.open(), time.monotonic()
        tasks = [asyncio.create_task(self.client(n, began + seconds)) for n in range(CLIENTS)]
        others = [asyncio.create_task(one) for one in self.others()]
        await self.troubles(began + seconds * 0.6)
        watch = asyncio.create_task(self.watch())
        await asyncio.gather(*tasks)
        for task in (*others, watch):
            task.cancel()
        for ended in await asyncio.gather(*others, watch, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        await asyncio.to_thread(calm)
        return await self.table(before)

    # ---- clients

    async def client(self, number: int, until: float) -> None:
        from tests.faults.surfaces import SURFACES
        from tests.running import NO_TLS

        dice = random.Random(f"{self.tally.seed} client {number}")
        turn = 0
        while time.monotonic() < until:
            turn += 1
            surface, way = dice.choice(SURFACES), dice.choice(["stay"] * 5 + ["leave", "slow"])
            key = self.keys[dice.choice([*USERS])]
            model = "nope" if dice.random() < 0.03 else "m"
            patience = dice.random() * 0.4
            door = self.doors[dice.randrange(len(self.doors))]
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{door.port}",
                trust_env=False,
                timeout=WAIT,
                verify=NO_TLS,
            ) as http:
                head = {
                    "Authorization": f"Bearer {key}",
                    "X-Request-Id": f"c{number}-{turn}",
                    "Content-Type": surface.kind,
                }
                content = surface.body(model=model)
                request = http.build_request("POST", surface.path, content=content, headers=head)
                await self.one(http, request, surface, door, way, patience)

    async def one(
        self, http: Any, request: Any, surface: Any, door: Door, way: str, patience: float
    ) -> None:
        own, began = request.headers["x-request-id"], time.monotonic()
        door.asked.add(own)
        sent_at = noted(request)
        try:
            async with asyncio.timeout(patience if way == "leave" else WAIT):
                response, text = await self._asked(http, request, slowly=way == "slow")
        except (httpx.ConnectError, AttributeError):  # anyio's, of a connection reset at once
            proper = door.went_down_since(began)
            self._count(own, "not connected (restart)" if proper else "improper", "no connection")
            await asyncio.sleep(0.2)
        except TimeoutError:
            if way == "leave":
                self.tally.left[own] = time.monotonic() - sent_at[0] if sent_at else 0.0
            self._count(own, "left" if way == "leave" else "hung")
        except httpx.TransportError as error:
            self._broke(own, surface, door, began, error)
        else:
            end = self._end_of(surface, response, text)
            self._count(own, end, f"{surface.name}: {text[-200:]!r}")
            self._heard(own, response, text, began)

    async def _asked(self, http: Any, request: Any, *, slowly: bool) -> tuple[Any, str]:
        """The answer and its text, from the first byte to the last."""
        response = await http.send(request, stream=True)
        own = request.headers["x-request-id"]
        self.tally.sent.add(own)
        self.tally.answered.add(own)
        received = b""
        async for part in response.aiter_raw():
            received += part
            if slowly:
                await asyncio.sleep(0.01)
        await response.aclose()
        return response, received.decode("latin-1")

    def _broke(
        self, own: str, surface: Any, door: Door, began: float, error: httpx.TransportError
    ) -> None:
        """The connection ended before the answer did."""
        if door.went_down_since(began):
            self.tally.lost[own] = max(0.0, door.downs[-1] - began)
            self._count(own, "cut by a restart")
        elif surface.path == "/v1/audio/speech" or (
            own in self.tally.answered and not surface.streamed
        ):
            # A whole answer that breaks off after its head has no other way to say so.
            self._count(own, "broken off")
        else:
            self._count(own, "improper", f"{surface.name}: {error!r}")

    @abstractmethod
    def _heard(self, own: str, response: Any, text: str, began: float) -> None:
        """What else there is to be said of an answer."""

    def _count(self, own: str, end: str, why: str = "") -> None:
        tally = self.tally
        tally.ends[end] += 1
        if not end.startswith("not connected"):
            tally.sent.add(own)
        if end.startswith("whole"):
            tally.whole.add(own)
        elif end.startswith(("refused", "stream with")):
            tally.refused.add(own)
        elif end in ("hung", "improper"):
            tally.improper.append(f"{own} {end} {why}")

    def _end_of(self, surface: Any, response: Any, text: str) -> str:
        """A proper end, or a proper error; or "improper"."""
        status, kind = response.status_code, response.headers.get("content-type", "")
        if status != httpx.codes.OK:
            return f"refused {status}" if kind == "application/json" else "improper"
        if not surface.streamed or kind == "application/json":
            return "whole answer" if _is_whole(kind, text) else "improper"
        if surface.last_words in text:
            return "whole stream"
        last = text.strip().rpartition("\n")[2]
        return "stream with an error at its end" if '"error"' in last else "improper"

    # ---- trouble

    async def admin(self) -> None:
        dice = random.Random(f"{self.tally.seed} admin")
        while True:
            await asyncio.sleep(0.5)
            await asyncio.to_thread(change_something, dice)
            self.tally.deeds["changes of weights and backends"] += 1

    async def deaths(self) -> None:
        """A backend dies with all its connections and comes back on its port."""
        from tests.stubs.openai_stub import OpenAIStub

        dice = random.Random(f"{self.tally.seed} deaths")
        while True:
            await asyncio.sleep(3 + 4 * dice.random())
            number = dice.randrange(BACKENDS)
            old = self.stubs[number]
            with contextlib.suppress(Exception):
                await old.close()
            await asyncio.sleep(dice.random())
            new = self.stubs[number] = await OpenAIStub.start(port=old.server.port)
            new.behaviour = old.behaviour
            self.tally.deeds["backend deaths"] += 1

    async def watch(self) -> None:
        while True:
            for name, pid in self.pids().items():
                with contextlib.suppress(FileNotFoundError):
                    self.rss.setdefault(name, []).append((time.monotonic(), rss_of(pid)))
            await asyncio.sleep(1)

    # ---- the end

    def open(self) -> dict[str, int]:
        """{process: open sockets and files}"""
        return {name: self.open_in(pid) for name, pid in self.pids().items()}

    def open_in(self, pid: int) -> int:
        return len(open_files(pid))

    async def _until_idle(self) -> Any:
        """The scheduler's figures, once they say that nothing runs or waits."""
        end = time.monotonic() + SETTLING
        while True:
            stats = await self.get("/api/admin/scheduler/stats", self.keys["root"])
            busy = stats["queue"]["total"] + sum(b["in_flight"] for b in stats["backends"])
            if not busy or time.monotonic() > end:
                return stats
            await asyncio.sleep(0.5)

    async def table(self, before: dict[str, int]) -> list[Line]:
        stats = await self._until_idle()
        usage = [await self.get("/v1/usage/me", self.keys[name]) for name in USERS]
        in_flight = sum(b["in_flight"] for b in stats["backends"])
        running = sum(one["running"] for one in stats["fair_share"]["user_stats"])
        reserved = sum(one["reserved"] for one in usage)
        at_stubs = sum(stub.running for stub in self.stubs)
        for stub in self.stubs:
            await stub.close()  # so that the pool's idle connections end
        after = await self._until_closed(before)
        await self.recorded()
        may_lack = await asyncio.to_thread(self.may_lack)
        used = sum(one["used"] for one in usage)
        facts = await asyncio.to_thread(facts_of, self.tally, used, may_lack)
        tally = self.tally
        return [
            ("requests sent", len(tally.sent), len(tally.sent) > 0),
            *((f"  {end}", count, True) for end, count in sorted(tally.ends.items())),
            *((f"{deed}", count, True) for deed, count in sorted(tally.deeds.items())),
            ("clients without a proper end", len(tally.improper), not tally.improper),
            ("in flight", in_flight, in_flight == 0),
            ("running (holds)", running, running == 0),
            ("queued", stats["queue"]["total"], stats["queue"]["total"] == 0),
            ("reserved of budgets", reserved, reserved == 0),
            ("running at the backends", at_stubs, at_stubs == 0),
            *(
                (f"open files and sockets of {name}, before and after",
                 f"{before[name]} {after[name]}", after[name] <= before[name])
                for name in before
            ),
            *self._memory(),
            *facts,
        ]  # fmt: skip

    def _memory(self) -> list[Line]:
        lines: list[Line] = []
        for name, seen in self.rss.items():
            late = [rss for at, rss in seen if at > seen[0][0] + 10]
            growth = late[-1] - min(late[:10]) if late else 0.0
            what = f"RSS of {name}, MB, and grown since 10 s after the last start"
            lines.append((what, f"{seen[-1][1]:.0f} {growth:.1f}", growth < MOST_GROWTH))
        return lines

    @abstractmethod
    async def recorded(self) -> None:
        """Wait until all that was spooled is in the database."""

    def may_lack(self) -> float:
        """Tokens that the documentation says budgets may lack."""
        return 0.0

    async def _until_closed(self, before: dict[str, int]) -> dict[str, int]:
        end = time.monotonic() + SETTLING
        while True:
            found = self.open()
            if all(found[name] <= before[name] for name in before):
                return found
            if time.monotonic() > end:
                for name, pid in self.pids().items():
                    kinds = Counter(one.split(":")[0] for one in open_files(pid))
                    print(f"open in {name}:", kinds)
                return found
            await asyncio.sleep(0.5)


class Alone(Site):
    """One gateway that schedules by itself."""

    def __init__(self, router: Any, stubs: list[Any], keys: dict[str, str], tally: Tally) -> None:
        super().__init__(stubs, keys, tally)
        self.router = router
        self.doors = [Door(router.port)]

    async def start(self) -> None:
        await self.router.start(**ENVIRONMENT)

    async def close(self) -> None:
        await self.router.close()

    def pids(self) -> dict[str, int]:
        return {"the gateway": self.router.process.pid}

    async def troubles(self, until: float) -> None:
        dice = random.Random(f"{self.tally.seed} restarts")
        while time.monotonic() < until - 8:
            await asyncio.sleep(8 + 4 * dice.random())
            way = dice.choice([signal.SIGTERM, signal.SIGKILL])
            self.doors[0].goes_down()
            self.router.send_signal(way)
            await self.router.ended(30)
            await self.router.start(**ENVIRONMENT)
            self.doors[0].is_up()
            self.tally.deeds[f"restarts by {way.name}"] += 1

    def others(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().others(), self.loads()]

    async def loads(self) -> None:
        """The recorder."""
        while True:
            await self.recorded()
            gc.collect()
            await asyncio.sleep(2)

    async def recorded(self) -> None:
        await asyncio.to_thread(record, self.router.folder)

    async def get(self, path: str, key: str) -> Any:
        return await asked(self.router.port, path, key)

    def _heard(self, own: str, response: Any, text: str, began: float) -> None:
        """Nothing: its scheduler is never away."""


def noted(request: httpx.Request) -> list[float]:
    """Will hold the moment at which all of the request had been sent."""
    sent_at: list[float] = []

    async def trace(what: str, _: Any) -> None:
        if what == "http11.send_request_body.complete":
            sent_at.append(time.monotonic())

    request.extensions["trace"] = trace
    return sent_at


async def asked(port: int, path: str, key: str) -> Any:
    """The document at an address, by a connection that is closed again."""
    from tests.running import NO_TLS

    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False, verify=NO_TLS) as http:
        answer = await http.get(path, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT)
    return answer.json()


def rss_of(pid: int) -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def open_files(pid: int) -> list[str]:
    """What its open sockets and files are."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(one.readlink()))
    return found


def _is_whole(kind: str, text: str) -> bool:
    """Whether a document is one; sound has no end that could be missed."""
    if "json" not in kind:
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def record(folder: Path) -> None:
    """Load what has been spooled."""
    from django.db import connection

    from scheduler.loading import load

    load(folder / "spool")
    connection.close()


def change_something(dice: random.Random) -> None:
    from django.db import connection

    from accounts.models import Group
    from backends.models import Backend as Row

    weight = dice.choice([0, 0.5, 1, 3, 10])
    Group.objects.filter(name=dice.choice([*USERS])).update(scheduler_weight=weight)
    fields = dice.choice(
        [{"enabled": dice.random() < 0.8}, {"max_concurrent": dice.randint(1, 6)}, {"priority": 1}]
    )
    Row.objects.filter(name=f"b{dice.randrange(BACKENDS)}").update(**fields)
    connection.close()


def calm() -> None:
    from django.db import connection

    from backends.models import Backend as Row

    Row.objects.update(enabled=True)
    connection.close()


def facts_of(tally: Tally, used: float, may_lack: float) -> list[Line]:
    """What the records say, beside what clients and backends saw and budgets have counted."""
    from django.db.models import Sum

    from scheduler.models import Decision, UsageHour

    rows = list(Decision.objects.values(
        "request_id", "client_request_id", "outcome", "usage_estimated", "prompt_tokens",
        "completion_tokens", "charged_tokens", "ended_at",
    ))  # fmt: skip
    by_own = Counter(row["client_request_id"] for row in rows)
    outcome = {row["client_request_id"]: row["outcome"] for row in rows}
    outcomes = Counter(outcome.values())
    missing = tally.sent - set(by_own)
    killed = [tally.lost[own] for own in missing if own in tally.lost]
    left = [tally.left[own] for own in missing if own in tally.left]
    of_nobody = set(by_own) - tally.sent
    other = {own for own in tally.whole if outcome.get(own) != "completed"}
    other |= {own for own in tally.refused if outcome.get(own) == "completed"}
    gone = tally.left.keys() | tally.lost.keys()
    aborted = {own for own, is_so in outcome.items() if is_so == "aborted"}
    unseen = tally.told.keys() - {row["request_id"] for row in rows}
    exact = wrong = told_sum = counted = 0
    for row in rows:
        told = tally.told.get(row["request_id"])
        if row["outcome"] != "completed" or row["usage_estimated"] or not told:
            continue
        exact += 1
        told_sum += sum(told[-1])
        counted += (row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0)
        wrong += (row["prompt_tokens"], row["completion_tokens"] or 0) != told[-1]
    total = UsageHour.objects.aggregate(n=Sum("requests"), charged=Sum("charged_tokens"))
    charged = sum(row["charged_tokens"] for row in rows)
    double = sum(count - 1 for count in by_own.values())
    lacking = tally.answered - set(by_own)
    return [
        ("records", len(rows), len(rows) == len(tally.sent) - len(missing)),
        *((f"  {name}", count, True) for name, count in sorted(outcomes.items())),
        ("sent without a record", len(missing), len(missing) == len(left) + len(killed)),
        ("  had left before it was read", len(left), True),
        ("    the last of these, s after all was sent", round(max(left, default=0.0), 3),
         max(left, default=0.0) < UNREAD_SECONDS),
        ("  was killed before it had a start marker", len(killed), True),
        ("    the oldest of these, s since its client began", round(max(killed, default=0.0), 3),
         max(killed, default=0.0) < UNRECORDED_SECONDS),
        ("reached a backend without a record", len(unseen), not unseen),
        ("answered without a record", len(lacking), not lacking),
        ("records of requests that nobody sent", len(of_nobody), not of_nobody),
        ("recorded twice", double, double == 0),
        ("recorded as another end than the client had", len(other), not other),
        ("aborted without a process that died", len(aborted - gone),
         aborted <= gone),
        ("records without an end", sum(r["ended_at"] is None for r in rows),
         all(r["ended_at"] is not None for r in rows)),
        ("answers whose usage a backend told", exact, exact > 0),
        ("  tokens told", told_sum, True),
        ("  tokens recorded", counted, counted == told_sum),
        ("  of another number than told", wrong, wrong == 0),
        ("requests in the hourly totals", total["n"], total["n"] == len(rows)),
        ("tokens charged, by the records", round(charged, 3), True),
        ("  the same less the hourly totals", round(charged - total["charged"], 3),
         abs(charged - total["charged"]) < 1e-3),
        ("  the same less what budgets say is used", round(charged - used, 3),
         -1e-3 < charged - used < may_lack + 1e-3),
        ("    what the documentation says may be lost of these, at most", round(may_lack, 3), True),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--cluster", action="store_true", help="a site of several processes")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-soak-"))
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
    with contextlib.ExitStack() as servers:
        cluster = None
        if arguments.cluster:
            from bench.soak_cluster import Cluster

            cluster = servers.enter_context(Cluster.servers())
        os.environ |= {
            "MINDROUTER_DATA": str(folder),
            "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
            "LOG_LEVEL": "WARNING",
        }
        import django

        django.setup()
        kind = "a cluster" if arguments.cluster else "one process"
        print(f"seed {arguments.seed}, {arguments.minutes:g} minutes, {kind}", flush=True)
        tally = Tally(arguments.seed)
        table = uvloop.run(soak(folder, arguments.minutes, tally, cluster))
    tell(table, tally, folder)


def tell(table: list[Line], tally: Tally, folder: Path) -> None:
    """Print it all, and end with status 1 where something is wrong; then the logs stay."""
    for what, value, right in table:
        print(f"{what:<62} {value!s:>12} {'' if right else '  WRONG'}")
    for line in tally.improper[:20]:
        print("improper:", line)
    for log in sorted([folder / "log", *folder.glob("*.log")]):
        for line in log.read_text().splitlines() if log.exists() else ():
            if "ERROR" in line or "Trace" in line:
                print(f"{log.name}: {line}")
    wrong = [what for what, _, right in table if not right]
    print(json.dumps({"seed": tally.seed, "wrong": wrong}))
    if wrong:
        print(f"logs: {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
