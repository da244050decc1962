"""The scheduler's end of the bus: one leads, the others stand by.

Leading is a lease in Redis with a growing number, the epoch. Every message carries it, and gateways
follow the highest that they have seen: whatever an older leader still says is refused. A leader
that cannot renew its lease stops acting before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from django.conf import settings
from django.db import DatabaseError

from accounts.limits import Kind, Period
from scheduler.admission import Admission
from scheduler.bus import redis
from scheduler.bus.messages import (
    VERSION,
    Again,
    Ask,
    Beat,
    Broadcast,
    Bye,
    Cancel,
    Ended,
    FirstByte,
    Inward,
    Mark,
    Progress,
    Register,
    Retry,
    Runs,
    Settle,
    Submit,
    Told,
    ToScheduler,
    Waits,
    decode_holders,
    decode_inward,
    encode,
    read,
)
from scheduler.bus.peers import Held, Peer
from scheduler.bus.wire import Line
from scheduler.core.checkpoint import BrokenCheckpointError, check, checked
from scheduler.core.errors import SchedulerError
from scheduler.core.parts import as_json
from scheduler.core.scheduler import Scheduler
from scheduler.core.tunables import Tunables
from scheduler.runtime import (
    Runtime,
    broken_checkpoint_told,
    load_all,
    pausing,
    save_state,
)
from scheduler.serving import end_tasks
from scheduler.snapshot import BackendTelemetry

logger = logging.getLogger(__name__)

LEASE_SECONDS = 1.2
RENEW_SECONDS = 0.25
#: A leader stops acting so long before its lease ends.
MARGIN_SECONDS = 0.2
STANDBY_SECONDS = 0.1
#: Gateways that live renew their key in this time, even where Redis has lost it.
REAPPEAR_SECONDS = 1.5
#: No new leader waits longer for gateways that were there before.
GATHER_SECONDS = 5.0
#: Of so many gateways that were given up it is known what was counted, should they come back.
MOST_ABSENT = 1000

#: {key of a checkpoint beyond the scheduler's own: what it is}
_KINDS: dict[str, Any] = {
    "bus": dict[str, int],
    "absent": dict[str, int],
    "budgets": list[tuple[Kind, int | str, Period, float, float]],
}

#: {lease, epoch}; name, milliseconds → epoch or nothing. It grows even where Redis was emptied.
_ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = redis.call('INCR', KEYS[2])
if epoch < now then epoch = now; redis.call('SET', KEYS[2], string.format('%.0f', epoch)) end
redis.call('SET', KEYS[1], string.format('%.0f', epoch) .. ':' .. ARGV[1], 'PX', ARGV[2])
return string.format('%.0f', epoch)
"""
#: {lease}; holder, milliseconds → 1 if it was ours.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
#: {lease}; holder.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
#: {lease, shares}; holder, checkpoint → 1 if it was stored.
_SAVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""


class LostLeaseError(Exception):
    """Somebody else leads, or may do so soon."""


class SchedulerProcess(Runtime):
    """Stands by, leads, stands by again. Until it leads its scheduler is idle."""

    kind = "scheduler"

    def __init__(self) -> None:
        super().__init__()
        self.name = secrets.token_hex(4)
        self.epoch = 0  # of this leader; 0: it stands by
        self._holder = ""
        self._lead_until = 0.0
        self._connect()
        self._position = {redis.IN: b"0-0"}
        self._seen: set[str] = set()  # gateways that were there when last looked at
        self._polls: list[BackendTelemetry] = []
        self._answers: set[asyncio.Task[None]] = set()
        self._reset()

    @property
    def in_touch(self) -> bool:
        """Whether it leads."""
        return self.epoch > 0

    def _connect(self) -> None:
        self._control = redis.connect(settings.REDIS_URL)
        self._reader = Line(settings.REDIS_URL)
        self._writer = Line(settings.REDIS_URL)

    async def _disconnect(self) -> None:
        self._reader.close()
        self._writer.close()
        await redis.close(self._control)

    async def _connect_again(self) -> None:
        await self._disconnect()
        self._connect()

    def _reset(self) -> None:
        """As before the first lead."""
        self.peers: dict[str, Peer] = {}
        self._talkative: list[Peer] = []  # with something to be told
        self._wanted = asyncio.Event()
        self._expected: set[str] = set()  # gateways of the leader before, not heard of yet
        self._held_back: list[Inward] = []  # until all have registered
        self._saved: dict[str, int] = {}
        self._applied: dict[str, int] = {}  # of gateways that have not registered yet
        self._absent: dict[str, int] = {}  # of gateways that were given up; oldest first
        self._read_at = 0.0
        self._led_since = 0.0

    # ---- life

    async def _begin(self) -> None:
        """Load the configuration, to be kept up to date while standing by."""
        snapshot, telemetry, _ = await self._ask_database(load_all)
        now = time.monotonic()
        self._adopt(snapshot, now)
        self._observe(telemetry, now)

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        # Not the runtime's own: shares are saved and sampled only while leading.
        return [*super(Runtime, self)._background(), self._stand_by()]

    async def _end(self) -> None:
        """Let another one lead at once."""
        if self.epoch:
            await self._step_down()
        await self._disconnect()

    async def _stand_by(self) -> None:
        logger.info("Standing by")
        while True:
            try:
                if await self._acquire():
                    await self._lead()
            except (LostLeaseError, *redis.ERRORS) as error:
                if self.epoch:
                    logger.warning("No longer leading: %s", error)
            except Exception:
                logger.exception("The scheduler failed")
            if self.epoch:
                await self._step_down()
            await asyncio.sleep(STANDBY_SECONDS)

    async def _acquire(self) -> bool:
        asked_at = time.monotonic()
        await self._note_gateways()
        milliseconds = round(LEASE_SECONDS * 1000)
        told: Any = await self._control.eval(
            _ACQUIRE, 2, redis.LEADER, redis.EPOCH, self.name, milliseconds
        )
        if told is None:
            return False
        self.epoch = int(told)
        self._holder = f"{self.epoch}:{self.name}"
        self._lead_until = asked_at + LEASE_SECONDS - MARGIN_SECONDS
        return True

    async def _note_gateways(self) -> None:
        """Remember who is there, unless Redis has just been emptied and no longer knows."""
        if await self._control.exists(redis.EPOCH):
            members: Any = await self._control.smembers(redis.GATEWAYS)
            self._seen = {member.decode() for member in members}

    async def _step_down(self) -> None:
        """Forget everything but who was there; a later lead begins anew."""
        with contextlib.suppress(Exception):
            await self._save_checkpoint()
        with contextlib.suppress(*redis.ERRORS):
            await self._control.eval(_RELEASE, 1, redis.LEADER, self._holder)
        self._seen |= set(self.peers)
        self.epoch = 0
        for peer in self.peers.values():
            for held in peer.jobs.values():
                held.claim.ticket.owner = None
        self._claims.clear()
        self._reset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.scheduler = Scheduler(Tunables())
        self.admission = Admission()
        now = time.monotonic()
        self._adopt(self.snapshot, now)
        self._observe(self._polls, now)

    # ---- leading

    async def _lead(self) -> None:
        """Until something fails. Raises: LostLeaseError or one of ``redis.ERRORS``."""
        logger.info("Leading in epoch %d", self.epoch)
        # Not a TaskGroup: in Python 3.11 it leaves its parent half cancelled.
        taking_over = asyncio.create_task(self._take_over())  # may take longer than a lease lasts
        tasks = [asyncio.create_task(self._renew())]
        try:
            await asyncio.wait([taking_over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if taking_over.done():
                taking_over.result()
                jobs = (
                    self._receive(),
                    self._send(),
                    self._beat(),
                    self._write_checkpoints(),
                    self._meter_shares(),
                )
                tasks += [asyncio.create_task(job) for job in jobs]
            failed, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed.pop().result()
        finally:
            await end_tasks([*tasks, taking_over])
            await self._connect_again()  # a command may have been cut off

    async def _take_over(self) -> None:
        self._position = {redis.IN: (await redis.last_entry(self._reader, redis.IN))[0]}
        self._expected = set(self._seen)
        state = await self._last_checkpoint()
        if state is not None:
            bus = state.get("bus", {})
            self._applied = dict(bus)
            self._saved = dict(bus)
            self._absent = dict(state.get("absent", {}))
            self._expected |= set(bus)
            await pausing(self.scheduler.restore_in_parts(state, time.monotonic()))
        # Anew, since what was used while standing by is not known.
        self.admission = Admission()
        self.admission.configure(self.snapshot, {}, (), time.monotonic())
        self.admission.restore((state or {}).get("budgets", []))
        self._led_since = self._read_at = time.monotonic()
        await self._tell_all()

    async def _last_checkpoint(self) -> dict[str, Any] | None:
        """The newest that can be read. Redis has it before the database does."""
        for kept in (self._checkpoint_in_redis, self._checkpoint_in_database):
            with broken_checkpoint_told():
                state = await kept()
                if state is not None:
                    await pausing(check(state))
                    for name, kind in _KINDS.items():
                        checked(state.get(name, kind()), kind)
                    return state
        return None

    async def _checkpoint_in_redis(self) -> dict[str, Any] | None:
        saved = await self._control.get(redis.SHARES)
        try:
            state: dict[str, Any] | None = None if saved is None else msgspec.json.decode(saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BrokenCheckpointError(str(error)) from error
        return state

    async def _checkpoint_in_database(self) -> dict[str, Any] | None:
        with contextlib.suppress(DatabaseError):
            return (await self._ask_database(load_all))[2]
        return None

    def _acts(self) -> None:
        """Raises: LostLeaseError when the lease may end any moment."""
        if time.monotonic() >= self._lead_until:
            raise LostLeaseError("the lease could not be renewed in time")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            asked_at = time.monotonic()
            milliseconds = round(LEASE_SECONDS * 1000)
            renewed: Any = await self._control.eval(
                _RENEW, 1, redis.LEADER, self._holder, milliseconds
            )
            if not renewed:
                raise LostLeaseError("another scheduler leads")
            self._lead_until = asked_at + LEASE_SECONDS - MARGIN_SECONDS

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(redis.BEAT_SECONDS)
            await self._look_for_silent_gateways()
            await self._tell_all()

    async def _tell_all(self) -> None:
        self._acts()
        gathering = bool(self._expected)
        beat = Beat(self.epoch, gathering, self.backends(), self._saved)
        data = encode(Broadcast(VERSION, beat))
        await self._writer.execute(redis.adding(redis.ALL, data, redis.ALL_ENTRIES))

    # ---- out

    def _has_news(self, peer: Peer) -> None:
        self._talkative.append(peer)
        self._wanted.set()

    async def _send(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._acts()
            peers, self._talkative = self._talkative, []
            if peers:
                await self._writer.execute(
                    *(
                        redis.adding(
                            redis.OUT + peer.name, peer.batch(self.epoch), redis.OUT_ENTRIES
                        )
                        for peer in peers
                    )
                )

    # ---- in

    async def _receive(self) -> None:
        while True:
            found = await redis.read(self._reader, self._position)
            self._read_at = time.monotonic()
            for _, data in found.get(redis.IN, ()):
                batch = read(decode_inward, data)
                if batch is not None and batch.epoch == self.epoch:
                    await self._take(batch)

    async def _take(self, batch: Inward) -> None:
        if self._expected:
            self._held_back.append(batch)
            if _is_first(batch):
                self._expected.discard(batch.gateway)
                await self._begin_if_complete()
            return
        await self._heed(batch)

    async def _begin_if_complete(self) -> None:
        """With all gateways heard, their jobs are taken up, and only then is anything granted."""
        if self._expected:
            return
        held_back, self._held_back = _from_last_registers(self._held_back), []
        self._resume_all(held_back)
        for batch in held_back:
            await self._heed(batch)
        self._pump(time.monotonic())
        logger.info("Scheduling for %d gateways", len(self.peers))

    async def _look_for_silent_gateways(self) -> None:
        now = time.monotonic()
        if now - self._read_at > redis.GATEWAY_SECONDS / 2:
            return  # it is this process that has not listened
        for name in list(self._expected):
            age = now - self._led_since
            gone = age > REAPPEAR_SECONDS and not await self._control.exists(redis.GATEWAY + name)
            if (gone or age > GATHER_SECONDS) and name in self._expected:
                self._give_up(name, self._counted_of(name))
                # At once: what comes while Redis is asked must find the others' jobs taken up.
                self._expected.discard(name)
                await self._begin_if_complete()
                await self._control.srem(redis.GATEWAYS, name)
        for peer in list(self.peers.values()):
            if now - peer.heard_at > redis.GATEWAY_SECONDS:
                logger.warning("Gateway %s is silent: %d jobs end", peer.name, len(peer.jobs))
                self._forget(peer)
                self._give_up(peer.name, peer.applied)
                await self._control.srem(redis.GATEWAYS, peer.name)

    def _give_up(self, name: str, applied: int) -> None:
        """Nothing is waited for any more; but it may just have been cut off, and come back to tell
        again what was counted, to this leader or a later one."""
        self._settled = True  # the checkpoint has it
        self._absent[name] = applied
        if len(self._absent) > MOST_ABSENT:
            del self._absent[next(iter(self._absent))]

    def _forget(self, peer: Peer) -> None:
        """It has gone, and holds nothing any more.

        Nothing is charged for what ran there. If it died, the records say so too; if it was cut
        off and comes back, it tells what it has and what has ended, and each is charged once.
        """
        self.peers.pop(peer.name, None)
        self._saved.pop(peer.name, None)
        peer.outbox.clear()
        for held in list(peer.jobs.values()):
            held.leave()
        self._settled = True

    async def _heed(self, batch: Inward) -> None:
        peer = self._peer_for(batch)
        if peer is None:
            return
        peer.heard_at = time.monotonic()
        peer.asks_again = {one.number for one in batch.messages if isinstance(one, Submit)}
        for message in batch.messages:
            if isinstance(message, Bye):
                self._forget(peer)
                return
            try:
                await self._do(peer, message)
            except Exception:
                logger.exception("A message of gateway %s failed: %r", peer.name, message)

    def _peer_for(self, batch: Inward) -> Peer | None:
        """Who sent it. None: something before it is missing, which has to be told again."""
        if _is_first(batch):
            peer = self._peer(batch.gateway)
            peer.begin_session(batch.session)
            return peer
        known = self.peers.get(batch.gateway)
        if known is None:  # it has been silent for too long, and was given up
            known = Peer(batch.gateway, self._has_news)
            known.session = batch.session
        elif known.takes(batch):
            return known
        known.tell(Again())
        return None

    def _peer(self, name: str) -> Peer:
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer(name, self._has_news)
            peer.applied = self._counted_of(name)
        return peer

    def _counted_of(self, name: str) -> int:
        """The serial of the last settlement counted of a gateway that has not registered yet."""
        return max(self._applied.pop(name, 0), self._absent.pop(name, 0))

    async def _do(self, peer: Peer, message: ToScheduler) -> None:
        match message:
            case Submit():
                await self._submit(peer, message)
            case Settle():
                self._settle(peer, message)
            case Register():
                self._register(peer, message)
            case Mark():
                self._mark(message)
            case Ask():
                self._keep(self._answer(peer, message))
            case Cancel() | Retry() | Progress() | FirstByte():
                held = peer.jobs.get(message.number)
                if held is not None:
                    self._change(held, message)

    async def _submit(self, peer: Peer, message: Submit) -> None:
        held = peer.jobs.get(message.number)
        if held is None:
            try:
                claim = await self.submit(message.job)
            except SchedulerError as refusal:
                peer.refuse(message.number, refusal, after_queueing=False)
                return
            held = Held(self, peer, message.number, claim)
        held.tell_state()

    def _settle(self, peer: Peer, message: Settle) -> None:
        held = peer.jobs.get(message.number)
        if message.serial <= peer.applied:
            return  # it has been told before
        peer.applied = message.serial
        if held is not None:
            if held.claim.ticket.state == "leased":
                held.claim.settle(message.usage)
            held.leave()

    def _change(self, held: Held, message: Cancel | Retry | Progress | FirstByte) -> None:
        claim = held.claim
        lease = claim.ticket.lease
        match message:
            case Cancel():
                held.leave()
            case Retry() if lease is not None:
                claim.retry(frozenset(message.exclude))
            case Progress():
                claim.progress(message.prompt_tokens, message.completion_tokens)
            case FirstByte() if lease is not None:
                self.scheduler.first_byte(lease, lease.dispatched_at + message.seconds)

    def _mark(self, message: Mark) -> None:
        if message.verdict == "ok":
            self.mark_ok(message.backend_id)
        elif message.verdict == "busy":
            self.mark_busy(message.backend_id, message.seconds)
        else:
            self.mark_failed(message.backend_id)

    # ---- taking up what runs and waits

    def _register(self, peer: Peer, message: Register) -> None:
        """Make what is known of a gateway's jobs agree with what it has."""
        self._settled = True  # the checkpoint names the gateways
        for ended in message.ended:
            self._settle_again(peer, ended)
        entries: list[Runs | Waits] = [*message.runs, *message.waits]
        listed = {entry.number for entry in entries} | peer.asks_again
        for held in [held for held in peer.jobs.values() if held.number not in listed]:
            held.leave()
        for _, entry in self._in_order([(peer, entry) for entry in entries]):
            self._take_up(peer, entry)
        self._pump(time.monotonic())

    def _resume_all(self, batches: list[Inward]) -> None:
        """After a failover: what has ended, then all jobs, those first who have had least."""
        entries: list[tuple[Peer, Runs | Waits]] = []
        counted: set[str] = set()  # request ids
        for batch in batches:
            register = batch.messages[0] if batch.messages else None
            if isinstance(register, Register):
                peer = self._peer(batch.gateway)
                for ended in register.ended:
                    if ended.settle.serial > peer.applied:
                        counted.add(ended.run.job.request_id)
                    self._settle_again(peer, ended)
                entries += [(peer, run) for run in register.runs]
                entries += [(peer, wait) for wait in register.waits]
        for peer, entry in self._in_order(entries):
            self._take_up(peer, entry)
        self.admission.leave_out(counted | {entry.job.request_id for _, entry in entries})

    def _in_order(
        self, entries: list[tuple[Peer, Runs | Waits]]
    ) -> list[tuple[Peer, Runs | Waits]]:
        standing = self.scheduler.standing
        return sorted(entries, key=lambda one: (standing(one[1].job), -one[1].age))

    def _settle_again(self, peer: Peer, ended: Ended) -> None:
        """Count a settlement that may have been told to a leader who could not save it."""
        if ended.settle.serial > peer.applied and ended.run.number not in peer.jobs:
            self._take_up(peer, ended.run)
        self._settle(peer, ended.settle)

    def _take_up(self, peer: Peer, entry: Runs | Waits) -> None:
        held = peer.jobs.get(entry.number)
        if isinstance(entry, Runs):
            running = (entry.backend_id, entry.running_for)
            if held is not None and held.claim.ticket.state != "leased":
                held.leave()
                held = None
            if held is None:
                self._resume(peer, entry, frozenset(), running)
        elif held is None:
            self._resume(peer, entry, frozenset(entry.avoid), None)
        elif held.claim.ticket.state == "leased":
            if held.claim.ticket.attempts > entry.attempts:
                held.tell_lease()
            else:
                held.claim.retry(frozenset(entry.avoid))

    def _resume(
        self,
        peer: Peer,
        entry: Runs | Waits,
        avoid: frozenset[int],
        running: tuple[int, float] | None,
    ) -> None:
        try:
            claim = self.resume(
                entry.job,
                age=entry.age,
                attempts=entry.attempts,
                avoid=avoid,
                running=running,
            )
        except SchedulerError as refusal:
            logger.warning("A job of gateway %s is not taken up: %s", peer.name, refusal)
            peer.refuse(entry.number, refusal, after_queueing=True)
            return
        Held(self, peer, entry.number, claim)

    # ---- questions

    def _keep(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, peer: Peer, question: Ask) -> None:
        peer.tell(Told(question.question, await self._answer_to(peer, question)))

    async def _answer_to(self, peer: Peer, question: Ask) -> bytes:
        match question.what:
            case "view":
                return encode(await self._current_view())
            case "waiting":
                return encode((time.monotonic(), await self._all_waiting()))
            case "picture":
                picture = await self._take_picture()
                return encode((picture.taken_at, picture.flows))
            case "limits":
                asked = decode_holders(encode(question.argument))
                return encode(await self.use_of(asked))
            case "evict":
                return encode(await self._evict(str(question.argument)))
            case "position":
                held = peer.jobs.get(question.argument)
                return b"" if held is None else encode(await held.claim.position())
        return b""

    # ---- configuration and shares

    def _observe(self, telemetry: list[BackendTelemetry], now: float) -> None:
        super()._observe(telemetry, now)
        self._polls = telemetry

    async def _polled(self, now: float) -> None:
        # Another one may lead; and of a checkpoint that is only half read all would be forgotten
        # whose usage is in what has expired since.
        if self._led_since and now < self._lead_until:
            await super()._polled(now)

    async def _learn_budgets(self) -> None:
        """Not before all gateways have told what is under way, and so is counted here."""
        if not self._expected:
            await super()._learn_budgets()

    async def _end_drains(self) -> None:
        """Not before all gateways have told what runs: what nobody has told of looks idle."""
        if self._led_since and not self._expected:
            await super()._end_drains()

    async def _save_checkpoint(self) -> None:
        if not self._settled or not self._led_since or time.monotonic() >= self._lead_until:
            return  # nothing new, or not all has been taken over yet, or the lease is over
        self._settled = False
        # All as of now: the shares and budgets must hold just the settlements up to these.
        applied = {name: peer.applied for name, peer in self.peers.items()} | self._applied
        absent = dict(self._absent)
        budgets = self.admission.ledger.budgets()
        state = await pausing(self.scheduler.checkpoint_in_parts(time.monotonic()))
        state |= {"bus": applied, "absent": absent, "budgets": await pausing(as_json(budgets))}
        stored: Any = await self._control.eval(
            _SAVE, 2, redis.LEADER, redis.SHARES, self._holder, msgspec.json.encode(state)
        )
        if stored:
            self._saved = applied
            await self._ask_database(save_state, state)


def _is_first(batch: Inward) -> bool:
    """Whether it begins a session."""
    return bool(batch.messages) and isinstance(batch.messages[0], Register)


def _from_last_registers(batches: list[Inward]) -> list[Inward]:
    """What comes before a gateway's last registration has been told again in it."""
    last = {batch.gateway: place for place, batch in enumerate(batches) if _is_first(batch)}
    return [batch for place, batch in enumerate(batches) if place >= last.get(batch.gateway, 0)]
