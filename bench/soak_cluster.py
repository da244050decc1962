"""The site that ``make soak CLUSTER=1`` puts under everything at once.

PostgreSQL, Redis, two schedulers, two gateways, recorder, worker and beat, each a process. In turns
of a random order the leader is killed and stopped, a gateway is killed and stopped, both are killed
at once, recorder and worker are started again, and Redis is frozen for a moment. What
docs/cluster.md says of each is held against what clients saw: who was refused for want of a
scheduler, and when.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.soak import ENVIRONMENT, SETTLING, Door, Line, Site, Tally, asked, open_files
from tests.scheduler.postgres import PostgreSQL, postgresql
from tests.scheduler.redis import RedisServer, redis_server

AWAY = "The scheduler cannot be reached right now."
#: While there is no scheduler (docs/cluster.md), a newcomer is refused within 3 s and those who
#: wait are kept for 10. Both count from the last beat, up to 0.5 s before its death; so nobody is
#: refused in the first 2.5 s of its absence.
REFUSED_SECONDS, KEPT_SECONDS, BEAT_SECONDS = 3.0, 10.0, 0.5
PATIENCE_SECONDS = REFUSED_SECONDS - BEAT_SECONDS
#: What a busy machine adds: until a request is with the scheduler, and an answer with its client.
#: Also from a scheduler's return until the last of those is refused that it comes too late for.
BUSY_SECONDS = 1.0
#: Budgets may lack what a gateway settled so long before it died (docs/cluster.md): what it had no
#: time to tell, some milliseconds' worth and what a busy machine adds; where the leader died with
#: it also what was not in the last checkpoint: the second between two and 0.1 s for each of them.
UNTOLD_SECONDS = 0.2
UNSAVED_SECONDS = 1.2 + UNTOLD_SECONDS
#: Connections at most, by the last word of a process's name: to the database, as docs/postgresql.md
#: has it; to Redis a gateway has one for each way, the leader three more to lead and to look.
TO_DATABASE = {"gateway": 3, "leader": 2, "standby": 2, "recorder": 1}
TO_REDIS = {"gateway": 2, "leader": 5, "standby": 1, "recorder": 0}
#: A freeze that is longer ends every lead.
LEASE_SECONDS = 1.2


class Cluster:
    """The servers, before Django is told of them."""

    def __init__(self, redis: RedisServer, database: PostgreSQL) -> None:
        self.redis, self.database = redis, database

    @classmethod
    @contextmanager
    def servers(cls) -> Iterator[Cluster]:
        with redis_server() as redis, postgresql() as database:
            os.environ["DATABASE_URL"] = database.url
            yield cls(redis, database)

    def site(
        self, folder: Path, stubs: list[Any], keys: dict[str, str], tally: Tally
    ) -> ClusterSoak:
        return ClusterSoak(folder, self, stubs, keys, tally)


class ClusterSoak(Site):
    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        stubs: list[Any],
        keys: dict[str, str],
        tally: Tally,
    ) -> None:
        from tests.cluster.site import ClusterSite, Gateway, Process

        super().__init__(stubs, keys, tally)
        self.redis, self.database = cluster.redis, cluster.database
        self.site = ClusterSite(folder, cluster.redis, cluster.database.url)
        self.site.environment |= ENVIRONMENT | {"LOG_LEVEL": "INFO"}
        self.site.second = Gateway(self.site, "second")
        self.helpers = [
            Process(
                self.site, name, "shell", "-v0", "-c",
                f"from mindrouter.celery import app; app.start(['{name}', '{option}'])",
            )
            for name, option in (("worker", "--pool=solo"), ("beat", "--pidfile="))
        ]  # fmt: skip
        self.doors = [Door(gateway.port) for gateway in self.site.gateways]
        self.leaderless: list[tuple[float, float]] = []  # from when until when
        self.away: list[tuple[float, float]] = []  # who was refused for that: asked, answered
        self.without_advice = 0
        # Since when what was settled there may not be counted, until when it may have settled
        self.killed: list[tuple[Door, float, float]] = []

    # ---- the processes

    async def start(self) -> None:
        for process in (*self.site.processes, *self.helpers):
            await process.start()
        for door in self.doors:
            await self._until(lambda door=door: self._is_ready(door))  # type: ignore[misc]
            for path in ("/api/admin/scheduler/stats", "/v1/usage/me"):
                await asked(door.port, path, self.keys["root"])
        await self._until(self._has_standby)

    async def close(self) -> None:
        await self.site.close()
        for process in self.helpers:
            await process.kill()

    def pids(self) -> dict[str, int]:
        leader = self.site.leader()
        [standby] = [one for one in self.site.schedulers if one is not leader]
        return {
            "the first gateway": self.site.first.pid,
            "the second gateway": self.site.second.pid,
            "the leader": leader.pid,
            "the standby": standby.pid,
            "the recorder": self.site.recorder.pid,
        }

    async def get(self, path: str, key: str) -> Any:
        return await asked(self.doors[0].port, path, key)

    async def _until(self, condition: Callable[[], Awaitable[bool]], within: float = 120.0) -> None:
        async with asyncio.timeout(within):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _is_ready(self, door: Door) -> bool:
        try:
            checks = (await asked(door.port, "/readyz", self.keys["ada"]))["checks"]
        except (OSError, ValueError, KeyError):
            return False
        except Exception as error:  # httpx's, of a port where nobody listens
            if type(error).__module__.startswith("httpx"):
                return False
            raise
        return bool(checks["scheduler"]["ok"] and checks["backends"]["ok"])

    async def _has_standby(self) -> bool:
        return all(one.log.count("Standing by") == one.starts for one in self.site.schedulers)

    def open_in(self, pid: int) -> int:
        """Without connections to the servers, which are made when they are first needed."""
        servers = self.database.port, self.redis.port
        return len(open_files(pid)) - sum(self.connections(pid, port) for port in servers)

    @staticmethod
    def connections(pid: int, port: int) -> int:
        """To whatever listens there."""
        inodes = set()
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, _, remote, *others = line.split()
            if int(remote.partition(":")[2], 16) == port:
                inodes.add(f"socket:[{others[6]}]")
        return sum(name in inodes for name in open_files(pid))

    def _connections(self) -> Iterator[Line]:
        servers = (
            ("PostgreSQL", self.database.port, TO_DATABASE),
            ("Redis", self.redis.port, TO_REDIS),
        )
        for server, port, bounds in servers:
            for name, pid in self.pids().items():
                count = self.connections(pid, port)
                yield f"connections of {name} to {server}", count, count <= bounds[name.split()[-1]]

    # ---- trouble

    async def troubles(self, until: float) -> None:
        dice = random.Random(f"{self.tally.seed} troubles")
        bag: list[Callable[[random.Random], Awaitable[None]]] = []
        while time.monotonic() < until - 8:
            await asyncio.sleep(2 + 3 * dice.random())
            if not bag:
                bag = [
                    self.leader_is_killed, self.leader_is_stopped,
                    self.gateway_is_killed, self.gateway_is_stopped, self.both_are_killed,
                    self.recorder_starts_again, self.worker_starts_again, self.redis_freezes,
                ]  # fmt: skip
                dice.shuffle(bag)
            await bag.pop()(dice)

    async def leader_is_killed(self, dice: random.Random) -> None:
        leader, began, leads = self.site.leader(), time.monotonic(), self._leads()
        await leader.kill()
        await self._until_led_anew(leads, began)
        await asyncio.sleep(3 * dice.random())
        await leader.start()
        await self._until(self._has_standby)
        self.tally.deeds["kill -9 of the leader"] += 1

    async def leader_is_stopped(self, dice: random.Random) -> None:
        leader, began, leads = self.site.leader(), time.monotonic(), self._leads()
        await leader.stop()
        await self._until_led_anew(leads, began)
        await leader.start()
        await self._until(self._has_standby)
        self.tally.deeds["SIGTERM to the leader"] += 1

    async def gateway_is_killed(self, dice: random.Random) -> None:
        door, gateway = self._either(dice)
        door.goes_down()
        since = time.time() - UNTOLD_SECONDS
        await gateway.kill()
        self.killed.append((door, since, time.time()))
        await asyncio.sleep(6 * dice.random())  # also shorter than it takes to be given up
        await self._comes_up(gateway, door)
        self.tally.deeds["kill -9 of a gateway"] += 1

    async def both_are_killed(self, dice: random.Random) -> None:
        door, gateway = self._either(dice)
        leader, began, leads = self.site.leader(), time.monotonic(), self._leads()
        door.goes_down()
        since = time.time() - UNSAVED_SECONDS
        await asyncio.gather(gateway.kill(), leader.kill())
        self.killed.append((door, since, time.time()))
        await self._until_led_anew(leads, began)
        await leader.start()
        await self._comes_up(gateway, door)
        await self._until(self._has_standby)
        self.tally.deeds["kill -9 of a gateway and the leader at once"] += 1

    async def gateway_is_stopped(self, dice: random.Random) -> None:
        door, gateway = self._either(dice)
        door.goes_down()
        await gateway.stop()
        await self._comes_up(gateway, door)
        self.tally.deeds["SIGTERM to a gateway"] += 1

    def _either(self, dice: random.Random) -> tuple[Door, Any]:
        """One of the two gateways, and its door."""
        return dice.choice([*zip(self.doors, self.site.gateways, strict=True)])

    async def _comes_up(self, gateway: Any, door: Door) -> None:
        await gateway.start()
        await self._until(lambda: self._is_ready(door))
        door.is_up()

    async def recorder_starts_again(self, dice: random.Random) -> None:
        recorder = self.site.recorder
        if dice.random() < 0.5:
            await recorder.kill()
            self.tally.deeds["kill -9 of the recorder"] += 1
        else:
            await recorder.stop()
            self.tally.deeds["SIGTERM to the recorder"] += 1
        await asyncio.sleep(2 * dice.random())
        await recorder.start()

    async def worker_starts_again(self, dice: random.Random) -> None:
        worker = self.helpers[0]
        await worker.kill()
        await worker.start()
        self.tally.deeds["kill -9 of the worker"] += 1

    async def redis_freezes(self, dice: random.Random) -> None:
        seconds = 0.5 + 4 * dice.random()
        began, leads = time.monotonic(), self._leads()
        self.redis.freeze()
        await asyncio.sleep(seconds)
        self.redis.thaw()
        if seconds > LEASE_SECONDS:
            await self._until_led_anew(leads, began)
        self.tally.deeds["Redis frozen for up to 4.5 s"] += 1

    def _leads(self) -> int:
        """How often a leader has taken over until now."""
        return sum(one.log.count("Scheduling for") for one in self.site.schedulers)

    async def _until_led_anew(self, leads: int, began: float) -> None:
        """Wait until a new leader schedules, and note for how long none did."""

        async def anew() -> bool:
            return self._leads() > leads

        await self._until(anew)
        self.leaderless.append((began, time.monotonic()))

    # ---- the end

    def _heard(self, own: str, response: Any, text: str, began: float) -> None:
        if AWAY not in text:
            return
        self.away.append((began, time.monotonic()))
        if response.status_code == 503:
            advice = response.headers.get("retry-after", "")
            self.without_advice += not (advice.isdigit() and 1 <= int(advice) <= 60)

    async def recorded(self) -> None:
        """The recorder has loaded all that the spool has."""
        from scheduler.models import SpoolCursor

        def whole() -> bool:
            from django.db import connection

            cursors = dict(SpoolCursor.objects.values_list("file_name", "offset"))
            connection.close()
            spool = self.site.folder / "spool"
            left = [*spool.glob("*.open"), *spool.glob("*.jsonl")]
            return all(cursors.get(one.stem, 0) == one.stat().st_size for one in left)

        async def has_all() -> bool:
            return await asyncio.to_thread(whole)

        await self._until(has_all, SETTLING)

    def may_lack(self) -> float:
        from django.db import connection
        from django.db.models import Sum

        from scheduler.models import Decision

        found = 0.0
        for door, since, until in self.killed:
            rows = Decision.objects.filter(
                client_request_id__in=door.asked,
                ended_at__gte=datetime.fromtimestamp(since, UTC),
                ended_at__lte=datetime.fromtimestamp(until, UTC),
            )
            found += rows.aggregate(sum=Sum("charged_tokens"))["sum"] or 0.0
        connection.close()
        return found

    async def table(self, before: dict[str, int]) -> list[Line]:
        lines = await super().table(before)
        outside = [
            refused
            for refused in self.away
            if not any(is_documented(*refused, *absence) for absence in self.leaderless)
        ]
        slowest = max((end - begun for begun, end in self.leaderless), default=0.0)
        bad = [path.name for path in (self.site.folder / "spool").glob("*.bad")]
        return [
            *lines,
            *self._connections(),
            ("times without a leader", len(self.leaderless), True),
            ("  the longest, s", round(slowest, 2), True),
            ("refused for want of a scheduler", len(self.away), True),
            (
                "  while there was one, or sooner or later than is documented",
                len(outside),
                not outside,
            ),
            ("  without a Retry-After", self.without_advice, not self.without_advice),
            ("lines of the spool that were set aside", len(bad), not bad),
        ]


def is_documented(asked: float, answered: float, begun: float, ended: float) -> bool:
    """Whether docs/cluster.md has this refusal while there was no scheduler from ``begun`` on."""
    if ended - begun <= PATIENCE_SECONDS or answered >= ended + BUSY_SECONDS:
        return False
    if asked < begun and answered - begun >= KEPT_SECONDS - BEAT_SECONDS:
        return True  # it had been let in, and has waited
    is_new = begun - BUSY_SECONDS <= asked < ended
    in_time = answered - asked < REFUSED_SECONDS + BUSY_SECONDS
    return is_new and answered - begun >= PATIENCE_SECONDS and in_time
