"""Everything at once for minutes or hours; at the end nothing may be lost, leaked or counted twice.

    make soak [MINUTES=2] [SEED=…]        (python -m bench.soak --minutes 2 --seed …)

The real gateway as a process of its own, three scripted backends, and clients of every API surface
who ask, leave, read slowly and come again, while weights and backends are changed, backends die and
come back, and the gateway is stopped and killed. What each of them does follows from the seed; the
moments at which things meet are the machine's. Ends with a table and, where a line of it is not as
it has to be, with status 1.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CLIENTS = 12
USERS = {"ada": 3, "bob": 2, "eve": 1, "kim": 0}
BACKENDS = 3
SETTLING = 60.0  # seconds for everything to end once nobody asks any more
MOST_GROWTH = 40  # MB of RSS from the first minute's end to the last
WAIT = 60.0


@dataclass
class Tally:
    """What clients and backends saw; keys are requests' ids."""

    seed: int
    sent: int = 0
    answered: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)  # with a process that was killed
    ends: Counter[str] = field(default_factory=Counter)
    improper: list[str] = field(default_factory=list)
    told: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by our own ids
    deeds: Counter[str] = field(default_factory=Counter)


async def soak(folder: Path, minutes: float, tally: Tally) -> list[tuple[str, Any, bool]]:
    from tests.processes import RouterProcess
    from tests.stubs.openai_stub import OpenAIStub

    stubs = [await OpenAIStub.start() for _ in range(BACKENDS)]
    for number, stub in enumerate(stubs):
        stub.behaviour = Backend(random.Random(f"{tally.seed} backend {number}"), tally).answer
    keys = await asyncio.to_thread(make_site, [stub.url for stub in stubs])
    router = RouterProcess(folder, keys["ada"])
    environment = {
        "BACKEND_FAIL_WINDOW": "0.5",
        "SCHEDULER_MAX_WAIT": "10",
        "QUEUE_KEEPALIVE_AFTER": "0.2",
        "SHUTDOWN_GRACE": "3",
    }
    try:
        await router.start(**environment)
        site = Site(router, environment, stubs, keys, tally)
        async with asyncio.timeout(minutes * 60 + 300):
            return await site.run(minutes * 60)
    finally:
        await router.close()
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


class Site:
    def __init__(
        self, router: Any, environment: dict[str, str], stubs: list[Any], keys: Any, tally: Tally
    ) -> None:
        self.router, self.environment, self.stubs = router, environment, stubs
        self.keys, self.tally = keys, tally
        self.stopping = False
        self.rss: list[tuple[float, float]] = []

    async def run(self, seconds: float) -> list[tuple[str, Any, bool]]:
        before, began = len(self._open()), time.monotonic()
        tasks = [asyncio.create_task(self.client(n, began + seconds)) for n in range(CLIENTS)]
        others = [asyncio.create_task(one) for one in (self.admin(), self.deaths(), self.loads())]
        await self.restarts(began + seconds * 0.5)
        watch = asyncio.create_task(self.watch())
        await asyncio.gather(*tasks)
        for task in (*others, watch):
            task.cancel()
        await asyncio.gather(*others, watch, return_exceptions=True)
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
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{self.router.port}",
                trust_env=False,
                timeout=WAIT,
                verify=NO_TLS,
            ) as http:
                await self.one(http, surface, f"c{number}-{turn}", key, model, way, patience)

    async def one(
        self, http: Any, surface: Any, own: str, key: str, model: str, way: str, patience: float
    ) -> None:
        process = self.router.process.pid
        head = {"Authorization": f"Bearer {key}", "X-Request-Id": own, "Content-Type": surface.kind}
        request = http.build_request(
            "POST", surface.path, content=surface.body(model=model), headers=head
        )
        try:
            async with asyncio.timeout(patience if way == "leave" else WAIT):
                response = await http.send(request, stream=True)
                self.tally.sent += 1
                self.tally.answered.add(own)
                received = b""
                async for part in response.aiter_raw():
                    received += part
                    if way == "slow":
                        await asyncio.sleep(0.01)
                await response.aclose()
        except (httpx.ConnectError, AttributeError):  # anyio's, of a connection reset at once
            self.tally.ends["not connected (restart)"] += 1
            await asyncio.sleep(0.2)
        except TimeoutError:
            self._count(own, "left" if way == "leave" else "hung")
        except httpx.TransportError as error:
            if self.stopping or process != self.router.process.pid:
                self.tally.lost.add(own)
                self._count(own, "cut by a restart")
            elif surface.path == "/v1/audio/speech" or own in self.tally.answered:
                # A whole answer that breaks off after its head has no other way to say so.
                self._count(own, "broken off")
            else:
                self._count(own, "improper", f"{surface.name}: {error!r}")
        else:
            self.tally.ends[self._end_of(surface, response, received.decode("latin-1"))] += 1

    def _count(self, own: str, end: str, why: str = "") -> None:
        self.tally.ends[end] += 1
        if own not in self.tally.answered:
            self.tally.sent += 1
        if end == "left":
            self.tally.left.add(own)
        if end in ("hung", "improper"):
            self.tally.improper.append(why or f"{own} {end}")

    def _end_of(self, surface: Any, response: Any, text: str) -> str:
        """A proper end, or a proper error; anything else is kept as improper."""
        status, kind = response.status_code, response.headers.get("content-type", "")
        if status != httpx.codes.OK:
            end = f"refused {status}" if kind == "application/json" else "improper"
        elif not surface.streamed or kind == "application/json":
            end = "whole answer" if _is_whole(kind, text) else "improper"
        elif surface.last_words in text:
            end = "whole stream"
        else:
            last = text.strip().rpartition("\n")[2]
            end = "stream with an error at its end" if '"error"' in last else "improper"
        if end == "improper":
            self.tally.improper.append(f"{surface.name}: {status} {kind} …{text[-200:]!r}")
        return end

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

    async def restarts(self, until: float) -> None:
        dice = random.Random(f"{self.tally.seed} restarts")
        while time.monotonic() < until - 8:
            await asyncio.sleep(8 + 4 * dice.random())
            way = dice.choice([signal.SIGTERM, signal.SIGKILL])
            self.stopping = True
            self.router.send_signal(way)
            await self.router.ended(30)
            await self.router.start(**self.environment)
            self.stopping = False
            self.tally.deeds[f"restarts by {way.name}"] += 1

    async def loads(self) -> None:
        """The recorder."""
        while True:
            await asyncio.to_thread(record, self.router.folder)
            gc.collect()
            await asyncio.sleep(2)

    async def watch(self) -> None:
        while True:
            self.rss.append((time.monotonic(), self._rss()))
            await asyncio.sleep(1)

    # ---- the end

    def _rss(self) -> float:
        text = Path(f"/proc/{self.router.process.pid}/statm").read_text()
        return int(text.split()[1]) * 4096 / 1e6

    def _open(self) -> list[str]:
        """The gateway's open sockets and files."""
        folder = Path(f"/proc/{self.router.process.pid}/fd")
        found = []
        for one in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(one.readlink()))
        return found

    async def _get(self, path: str, key: str) -> Any:
        answer = await self.router.client.get(path, headers={"Authorization": f"Bearer {key}"})
        return answer.json()

    async def _until_idle(self) -> Any:
        """The scheduler's figures, once they say that nothing runs or waits."""
        end = time.monotonic() + SETTLING
        while True:
            stats = await self._get("/api/admin/scheduler/stats", self.keys["root"])
            busy = stats["queue"]["total"] + sum(b["in_flight"] for b in stats["backends"])
            if not busy or time.monotonic() > end:
                return stats
            await asyncio.sleep(0.5)

    async def table(self, before: int) -> list[tuple[str, Any, bool]]:
        stats = await self._until_idle()
        usage = [await self._get("/v1/usage/me", self.keys[name]) for name in USERS]
        in_flight = sum(b["in_flight"] for b in stats["backends"])
        running = sum(one["running"] for one in stats["fair_share"]["user_stats"])
        reserved = sum(one["reserved"] for one in usage)
        at_stubs = sum(stub.running for stub in self.stubs)
        for stub in self.stubs:
            await stub.close()  # so that the pool's idle connections end
        sockets = await self._until_closed(before)
        await asyncio.to_thread(record, self.router.folder)
        facts = await asyncio.to_thread(facts_of, self.tally)
        late = [rss for at, rss in self.rss if at > self.rss[0][0] + 10]
        growth = late[-1] - min(late[:10]) if late else 0.0
        tally = self.tally
        return [
            ("requests sent", tally.sent, tally.sent > 0),
            *((f"  {end}", count, True) for end, count in sorted(tally.ends.items())),
            *((f"{deed}", count, True) for deed, count in sorted(tally.deeds.items())),
            ("clients without a proper end", len(tally.improper), not tally.improper),
            ("in flight", in_flight, in_flight == 0),
            ("running (holds)", running, running == 0),
            ("queued", stats["queue"]["total"], stats["queue"]["total"] == 0),
            ("reserved of budgets", reserved, reserved == 0),
            ("running at the backends", at_stubs, at_stubs == 0),
            ("open files and sockets, before", before, True),
            ("open files and sockets, after", sockets, sockets <= before),
            ("RSS, MB", f"{self._rss():.0f}", True),
            ("RSS grown since 10 s after the last start, MB", f"{growth:.1f}",
             growth < MOST_GROWTH),
            *facts,
        ]  # fmt: skip

    async def _until_closed(self, before: int) -> int:
        end = time.monotonic() + SETTLING
        await self.router.client.aclose()
        while True:
            found = self._open()
            if len(found) <= before:
                return len(found)
            if time.monotonic() > end:
                print("open:", Counter(name.split(":")[0] for name in found))
                return len(found)
            await asyncio.sleep(0.5)


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


def facts_of(tally: Tally) -> list[tuple[str, Any, bool]]:
    """What the records say, beside what clients and backends saw."""
    from django.db.models import Sum

    from scheduler.models import Decision, UsageHour

    rows = list(Decision.objects.values(
        "request_id", "client_request_id", "outcome", "usage_estimated", "prompt_tokens",
        "completion_tokens", "charged_tokens", "ended_at",
    ))  # fmt: skip
    by_own = Counter(row["client_request_id"] for row in rows)
    missing = tally.answered - set(by_own)
    outcomes = Counter(row["outcome"] for row in rows)
    # Fewer only by clients that left, or were lost, before their request was read.
    vanished = tally.sent - len(rows)
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
    return [
        ("records", len(rows), 0 <= vanished <= len(tally.left) + len(tally.lost)),
        *((f"  {outcome}", count, True) for outcome, count in sorted(outcomes.items())),
        ("sent without a record (had left, or killed)", vanished, True),
        ("answered without a record", len(missing), not missing),
        ("recorded twice", double, double == 0),
        ("records without an end", sum(r["ended_at"] is None for r in rows),
         all(r["ended_at"] is not None for r in rows)),
        ("answers whose usage a backend told", exact, exact > 0),
        ("  tokens told", told_sum, True),
        ("  tokens recorded", counted, counted == told_sum),
        ("  of another number than told", wrong, wrong == 0),
        ("requests in the hourly totals", total["n"], total["n"] == len(rows)),
        ("tokens charged, records less totals", round(charged - total["charged"], 6),
         abs(charged - total["charged"]) < 1e-3),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-soak-"))
    os.environ |= {
        "MINDROUTER_DATA": str(folder),
        "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
        "LOG_LEVEL": "WARNING",
    }
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
    import django

    django.setup()
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes", flush=True)
    tally = Tally(arguments.seed)
    table = uvloop.run(soak(folder, arguments.minutes, tally))
    for what, value, right in table:
        print(f"{what:<50} {value!s:>12} {'' if right else '  WRONG'}")
    for line in tally.improper[:20]:
        print("improper:", line)
    log = (folder / "log").read_text()
    print("".join(line + "\n" for line in log.splitlines() if "ERROR" in line or "Trace" in line))
    wrong = [what for what, _, right in table if not right]
    print(json.dumps({"seed": arguments.seed, "wrong": wrong}))
    shutil.rmtree(folder)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
