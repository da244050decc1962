"""The backends as the router knows them: slots in use, health, and what polls have said (P1, P5).

Each backend has one bit. ``alive`` and ``free`` are sets of backends as integers, so that "is
there a slot for this class" is one AND. A backend's bits are recomputed when something about it
changes, and when a window it stands in ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.core.jobs import BackendSpec, ModelSpec, Telemetry
from scheduler.core.queue import JobClass
from scheduler.core.tickets import Lease

NEVER = float("inf")
LONG_AGO = float("-inf")

#: In-flight counts are remembered at this spacing, and for so many steps.
HISTORY_STEP_SECONDS = 0.02
HISTORY_STEPS = 4096
#: A poll's figures may be this much older than its time stamp.
OBSERVATION_SLACK_SECONDS = 0.5
#: What a new measurement adds to a moving average.
FRESH_SHARE = 0.2
#: Output tokens per second and request, where nothing has been measured (R4).
TOKEN_RATE_UNKNOWN = 30.0


NO_LATENCY = 1  # of ``Measures.unknown``
NO_RATE = 2


class Measures:
    """Moving averages of one model on one backend. None: never measured."""

    __slots__ = ("changes", "latency_seconds", "tokens_per_second", "unknown")

    def __init__(self) -> None:
        self.latency_seconds: float | None = None  # dispatch to first byte
        self.tokens_per_second: float | None = None  # of one request
        self.unknown = NO_LATENCY | NO_RATE
        self.changes = 0  # counted, so that scores are worked out anew only then

    def note_latency(self, seconds: float) -> None:
        known = self.latency_seconds
        self.latency_seconds = seconds if known is None else known + FRESH_SHARE * (seconds - known)
        self.unknown &= ~NO_LATENCY
        self.changes += 1

    def note_rate(self, tokens_per_second: float) -> None:
        known, new = self.tokens_per_second, tokens_per_second
        self.tokens_per_second = new if known is None else known + FRESH_SHARE * (new - known)
        self.unknown &= ~NO_RATE
        self.changes += 1

    def restore(self, latency_seconds: float | None, tokens_per_second: float | None) -> None:
        """Take up what was measured before a restart."""
        self.latency_seconds, self.tokens_per_second = latency_seconds, tokens_per_second
        self.unknown = NO_LATENCY * (latency_seconds is None) | NO_RATE * (
            tokens_per_second is None
        )
        self.changes += 1


class BackendState:
    """One backend: its configuration, our use of it, and the advice of its last poll."""

    __slots__ = (
        "answered_at",
        "bit",
        "busy_until",
        "changes",
        "configured",
        "failed_at",
        "failed_until",
        "foreign",
        "fresh",
        "history",
        "in_flight",
        "limit",
        "measures",
        "others",
        "picked",
        "plain",
        "polled_utilization",
        "polled_waiting",
        "probe",
        "spec",
        "suspect",
        "telemetry",
    )

    def __init__(self, spec: BackendSpec, bit: int) -> None:
        self.spec = spec
        self.bit = bit
        self.configured = True
        self.in_flight = 0
        self.changes = 0  # of anything that its scores depend on
        self.limit = spec.max_concurrent  # less what others use of it
        self.plain = False  # alive, and only ``limit`` says whether a slot is free
        self.failed_at = LONG_AGO
        self.failed_until = LONG_AGO
        self.answered_at = LONG_AGO  # when a request succeeded after a failure or bad poll
        self.suspect = False  # has failed, and nothing has succeeded since
        self.probe: Lease | None = None  # the one request that a suspect backend is tried with
        self.busy_until = LONG_AGO
        self.telemetry: Telemetry | None = None
        self.fresh = False  # the telemetry is young enough to be heeded
        self.foreign = 0  # requests of others, at the last poll
        self.others = 0  # ``foreign``, while the poll is young enough
        self.polled_waiting = 0  # likewise
        self.polled_utilization: float | None = None  # likewise
        self.history: deque[list[float]] = deque(maxlen=HISTORY_STEPS)  # [time, in flight]
        self.measures: dict[str, Measures] = {}  # {model name: …}
        self.picked = 0  # when it was chosen last, as a serial number

    # ---- what polls say

    def is_down(self) -> bool:
        """The last poll could not reach it, and no request has succeeded since. Like a failed
        one it is left alone while there are others, and tried when there are none (P5)."""
        telemetry = self.telemetry
        return (
            self.fresh
            and telemetry is not None
            and telemetry.reachable is False
            and telemetry.observed_at >= self.answered_at
        )

    def fresh_telemetry(self) -> Telemetry | None:
        return self.telemetry if self.fresh else None

    def measures_of(self, model_name: str) -> Measures:
        measures = self.measures.get(model_name)
        if measures is None:
            measures = self.measures[model_name] = Measures()
        return measures

    def token_rate(self) -> float:
        """Output tokens per second of one request, over all models."""
        rates = [m.tokens_per_second for m in self.measures.values()]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else TOKEN_RATE_UNKNOWN

    def remember_in_flight(self, now: float) -> None:
        history = self.history
        in_flight = self.in_flight
        if history:
            latest = history[-1]
            if now - latest[0] < HISTORY_STEP_SECONDS:
                latest[2] = in_flight
                if in_flight > latest[1]:
                    latest[1] = in_flight
                return
        history.append([now, in_flight, in_flight])

    def in_flight_around(self, moment: float) -> int:
        """The most that we had in flight in the time a poll at ``moment`` may speak of."""
        most = 0.0
        for started, peak, last in reversed(self.history):
            if started <= moment - OBSERVATION_SLACK_SECONDS:
                return int(max(most, last))
            if started <= moment:
                most = max(most, peak)
        return int(most)


@dataclass(slots=True, eq=False)
class Offer:
    """One backend's model, as a class may use it."""

    backend: BackendState
    model: ModelSpec
    measures: Measures
    bit: int
    backend_id: int
    loaded: float = 0.5  # ``score_model_loaded``, as of the last poll
    # As it was scored last, cache affinity aside (``Scoring``):
    scored_as_of: int = -1
    points: tuple[int, tuple[float, ...]] = (0, ())
    total: float = 0.0


class Cluster:
    """All backends and their bits."""

    def __init__(self, fail_window: float, stale_after: float) -> None:
        self.by_id: dict[int, BackendState] = {}
        self.names: dict[int, str] = {}  # of those configured; replaced as a whole, never changed
        self.alive = 0  # enabled, not draining, not known to be down, not in a fail window
        self.free = 0  # of those, with a slot
        self.open = 0  # in the fail window, otherwise usable and with a slot
        self.changes_at = NEVER  # when a window or a telemetry's time ends
        self._next_bit = 1
        self._picks = 0
        self.tune(fail_window, stale_after)

    def tune(self, fail_window: float, stale_after: float) -> None:
        self._fail_window = fail_window
        self._stale_after = stale_after

    def configure(self, specs: Sequence[BackendSpec], now: float) -> None:
        """Take up the configuration. A removed backend is kept until its leases have ended."""
        for backend in self.by_id.values():
            backend.configured = False
        for spec in specs:
            known = self.by_id.get(spec.backend_id)
            if known is None:
                self._add(spec)
            else:
                known.spec = spec
                known.configured = True
        self.names = {spec.backend_id: spec.name for spec in specs}
        gone = [b for b in self.by_id.values() if not b.configured and not b.in_flight]
        for backend in gone:
            self._clear(backend)
            del self.by_id[backend.spec.backend_id]
        self.refresh_all(now)

    def _add(self, spec: BackendSpec) -> BackendState:
        backend = self.by_id[spec.backend_id] = BackendState(spec, self._next_bit)
        self._next_bit <<= 1
        return backend

    def kept(self, backend_id: int) -> BackendState:
        """The backend; if it was removed, what is left of it until its last job has ended."""
        backend = self.by_id.get(backend_id)
        if backend is None:
            backend = self._add(
                BackendSpec(
                    backend_id=backend_id, name="", address="", max_concurrent=0, max_queue=0
                )
            )
            backend.configured = False
        return backend

    def configured(self) -> Iterator[BackendState]:
        return (backend for backend in self.by_id.values() if backend.configured)

    # ---- what can be used

    def usable(self, cls: JobClass) -> int:
        """The backends that could take a job of the class now."""
        if cls.mask & self.alive:
            return cls.mask & self.free & ~cls.unfit
        if cls.avoid & self.alive:
            return cls.avoid & self.free & ~cls.unfit
        return cls.everything & self.open  # all have failed: fail open (P5)

    def refresh_all(self, now: float) -> None:
        self.changes_at = NEVER
        for backend in self.by_id.values():
            self.refresh(backend, now)

    def refresh(self, backend: BackendState, now: float) -> None:
        """Recompute the backend's bits and when they change by time alone."""
        backend.changes += 1
        self._clear(backend)
        self._look_at_age(backend, now)
        backend.limit = backend.spec.max_concurrent - backend.others
        busy = now < backend.busy_until
        failed = now < backend.failed_until or backend.is_down()
        if busy:
            self.changes_at = min(self.changes_at, backend.busy_until)
        if now < backend.failed_until:
            self.changes_at = min(self.changes_at, backend.failed_until)
        backend.plain = False
        if not self._in_service(backend):
            return
        room = backend.in_flight < backend.limit and not busy
        if failed:
            self.open |= backend.bit if room else 0
            return
        self.alive |= backend.bit
        backend.plain = not busy and not backend.suspect
        if room and not (backend.suspect and backend.probe is not None):
            self.free |= backend.bit

    def _in_service(self, backend: BackendState) -> bool:
        return backend.configured and backend.spec.in_service

    def _look_at_age(self, backend: BackendState, now: float) -> None:
        """Take the poll's figures while they are young, else none."""
        telemetry = backend.telemetry
        stale_at = telemetry.observed_at + self._stale_after if telemetry is not None else LONG_AGO
        backend.fresh = now < stale_at
        backend.others = backend.polled_waiting = 0
        backend.polled_utilization = None
        if telemetry is not None and backend.fresh:
            self.changes_at = min(self.changes_at, stale_at)
            backend.others = backend.foreign
            backend.polled_waiting = telemetry.waiting or 0
            backend.polled_utilization = telemetry.utilization

    def _clear(self, backend: BackendState) -> None:
        others = ~backend.bit
        self.alive &= others
        self.free &= others
        self.open &= others

    # ---- slots

    def take(self, backend: BackendState, lease: Lease, now: float) -> None:
        """A slot is taken: exact and at once."""
        backend.in_flight += 1
        backend.changes += 1
        self._picks += 1
        backend.picked = self._picks
        backend.remember_in_flight(now)
        if backend.plain:
            if backend.in_flight >= backend.limit:
                self.free &= ~backend.bit
            return
        if backend.suspect and backend.probe is None and now >= backend.failed_until:
            backend.probe = lease
        self.refresh(backend, now)

    def give_back(self, backend: BackendState, lease: Lease, now: float) -> None:
        backend.in_flight -= 1
        backend.changes += 1
        backend.remember_in_flight(now)
        if backend.plain:
            if backend.in_flight < backend.limit:
                self.free |= backend.bit
            return
        if backend.probe is lease:
            backend.probe = None
        self.refresh(backend, now)

    # ---- P5

    def mark_failed(self, backend: BackendState, now: float) -> None:
        backend.failed_at = now
        backend.failed_until = now + self._fail_window
        backend.suspect = True
        self.refresh(backend, now)

    def mark_busy(self, backend: BackendState, now: float, seconds: float) -> None:
        backend.busy_until = max(backend.busy_until, now + seconds)
        self.refresh(backend, now)

    def mark_ok(self, backend: BackendState, now: float) -> None:
        backend.failed_until = LONG_AGO
        backend.answered_at = now
        backend.suspect = False
        backend.probe = None
        self.refresh(backend, now)

    def observe(self, backend: BackendState, telemetry: Telemetry) -> bool:
        """Heed a poll, unless a younger one is known. True if it was heeded."""
        known = backend.telemetry
        if known is not None and telemetry.observed_at < known.observed_at:
            return False
        backend.telemetry = telemetry
        seen = (telemetry.running or 0) + (telemetry.waiting or 0)
        backend.foreign = max(0, seen - backend.in_flight_around(telemetry.observed_at))
        return True
