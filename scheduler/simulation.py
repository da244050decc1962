"""Recorded traffic once more, through the same core, with other weights, points, slots or backends.

PURE: the records in, figures out. Time is the records' own; nothing sleeps. What is assumed: each
request comes when it came, holds a slot for as long as it did, and yields as many tokens,
wherever it goes and whatever the slots. Memory is bounded by what waits and runs at one moment and
by the number of users, not by the length of the record.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.errors import Rejected
from scheduler.core.jobs import BackendSpec, Job, Needs, Strategy, Unit, Usage, UserSpec
from scheduler.core.scheduler import Lease, Scheduler, Ticket
from scheduler.core.tunables import Tunables
from scheduler.tally import Tally, TallyBook

#: Requests between two reports of progress.
REPORT_EVERY = 2_000
#: After so long without an event the scheduler is asked whether time alone changes something.
_QUIET_SECONDS = 0.25
_NO_NEEDS = Needs()  # records do not say
_KEPT = 0.99  # of the average that stands for what a record does not say


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request. Seconds on any one clock; None is unknown.

    ``service_seconds`` and ``completion_tokens`` are unknown of a request that was never served:
    it then gets the average of its model. ``patience_seconds``: its client left after having
    waited so long. ``waited_seconds`` is what was recorded, for comparison only.
    """

    at: float
    user_id: int
    unit: Unit
    model_name: str
    prompt_tokens: int
    completion_tokens: int | None
    service_seconds: float | None
    patience_seconds: float | None = None
    waited_seconds: float | None = None
    refused: str = ""
    backend_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The configuration that traffic is replayed under."""

    users: Mapping[int, UserSpec]
    backends: Sequence[BackendSpec]
    tunables: Tunables = field(default_factory=Tunables)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)


class Replay:
    """One run. Iterate over ``run`` to the end, then read ``result``."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._scheduler: Scheduler | None = None
        self._ends: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._waiting = 0
        self._calm = True  # nobody waited after the last pump: a freed slot concerns nobody
        self._now = 0.0
        self._usual: dict[str, tuple[float, float]] = {}  # {model: (tokens, seconds)}
        self.book = TallyBook(scenario.users)

    def run(self, arrivals: Iterable[Arrival]) -> Iterator[int]:
        """Replay the traffic, which must be in the order of its arrival.

        Yields the number of requests so far, every ``REPORT_EVERY`` of them and at the end.
        """
        count = 0
        for count, arrival in enumerate(arrivals, start=1):
            if self._scheduler is None:
                self._begin(arrival.at)
            self._until(arrival.at)
            self._arrive(arrival)
            if not count % REPORT_EVERY:
                yield count
        self._finish()
        yield count

    def result(self) -> dict[str, Any]:
        """See ``TallyBook.result``."""
        return self.book.result(self._scenario.backends)

    def _begin(self, at: float) -> None:
        scenario = self._scenario
        self._now = at
        self._scheduler = Scheduler(scenario.tunables)
        self._scheduler.configure(
            tunables=scenario.tunables,
            users=scenario.users,
            backends=scenario.backends,
            strategies=scenario.strategies,
            now=at,
        )

    # ---- time

    def _until(self, when: float) -> None:
        """Let everything happen that does before ``when``."""
        ends = self._ends
        while ends and ends[0][0] <= when:
            self._pass_time(ends[0][0])
            at, _, happen = heapq.heappop(ends)
            self._now = at
            happen(at)
        self._pass_time(when)
        self._now = when

    def _pass_time(self, when: float) -> None:
        """Longest waits end and credits halve by time alone; that matters only to those who wait,
        and within a busy moment the next event sees to it."""
        scheduler = self._scheduler
        while scheduler and self._waiting and when - self._now > _QUIET_SECONDS:
            event = scheduler.next_event(self._now)
            if event is None or event >= when:
                return
            self._now = max(event, self._now + 1e-6)
            self._pump(self._now)

    def _finish(self) -> None:
        """Nobody comes any more: serve what waits and let it end."""
        while self._ends:
            self._until(self._ends[0][0])
        scheduler = self._scheduler
        while scheduler and self._waiting:
            event = scheduler.next_event(self._now)
            if event is None:
                return
            self._now = max(event, self._now + 1e-6)
            self._pump(self._now)
            while self._ends:
                self._until(self._ends[0][0])

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._ends, (when, self._serial, happen))

    # ---- one request

    def _arrive(self, arrival: Arrival) -> None:
        tally = self.book.of(arrival.user_id)
        tally.requests += 1
        self.book.began(arrival.at)
        job = Job(
            request_id="",
            user_id=arrival.user_id,
            unit=arrival.unit,
            model_name=arrival.model_name,
            prompt_tokens=arrival.prompt_tokens,
            needs=_NO_NEEDS,
        )
        scheduler = self._scheduler
        assert scheduler is not None  # noqa: S101  made at the first arrival
        try:
            ticket = scheduler.submit(job, arrival.at)
        except Rejected as refusal:
            tally.refused[refusal.reason] += 1
            self._pump(arrival.at)
            return
        ticket.owner = (arrival, tally)
        self._waiting += 1
        self._pump(arrival.at)
        if arrival.patience_seconds is not None and ticket.state == "queued":
            self._at(arrival.at + arrival.patience_seconds, lambda now: self._leave(ticket, now))

    def _leave(self, ticket: Ticket, now: float) -> None:
        if ticket.state == "queued" and self._scheduler is not None:
            self._waiting -= 1
            self._scheduler.cancel(ticket, now)
            ticket.owner[1].left += 1
            self._pump(now)

    def _pump(self, now: float) -> None:
        scheduler = self._scheduler
        assert scheduler is not None  # noqa: S101  as above
        for ticket in scheduler.pump(now):
            self._waiting -= 1
            arrival, tally = ticket.owner
            if ticket.lease is None:
                tally.refused[ticket.error.reason if ticket.error else "queue_timeout"] += 1
            else:
                self._serve(ticket.lease, arrival, tally, now)
        self._calm = not self._waiting

    def _serve(self, lease: Lease, arrival: Arrival, tally: Tally, now: float) -> None:
        completion, seconds = self._learn(arrival)
        usage = Usage(prompt_tokens=arrival.prompt_tokens, completion_tokens=completion)
        tally.serve(
            arrival.prompt_tokens + completion, now - arrival.at, contended=self._waiting > 0
        )
        self.book.busy[lease.backend_id] += seconds

        def end(now: float) -> None:
            assert self._scheduler is not None  # noqa: S101  as above
            self._scheduler.settle(lease, usage, now)
            lease.ticket.lease = None  # a cycle less for the collector of garbage
            self.book.ended(now)
            if not self._calm:
                self._pump(now)

        self._at(now + seconds, end)

    def _learn(self, arrival: Arrival) -> tuple[int, float]:
        """The answer's tokens and the seconds in a slot: as recorded, else the model's average."""
        usual = self._usual.get(arrival.model_name)
        tokens, seconds = arrival.completion_tokens, arrival.service_seconds
        if tokens is None or seconds is None:
            usual = usual or (256.0, 10.0)
            return round(usual[0]) if tokens is None else tokens, (
                usual[1] if seconds is None else seconds
            )
        if usual is None:
            self._usual[arrival.model_name] = (float(tokens), seconds)
        else:
            self._usual[arrival.model_name] = (
                _KEPT * usual[0] + (1.0 - _KEPT) * tokens,
                _KEPT * usual[1] + (1.0 - _KEPT) * seconds,
            )
        return tokens, seconds


class Recorded:
    """The same figures of what has really happened, from the records alone."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._waiting = 0
        self._dispatches: list[tuple[float, int, Arrival]] = []
        self._serial = 0
        self.book = TallyBook(scenario.users)

    def add(self, arrival: Arrival) -> None:
        """One more record, in the order of arrival."""
        self._until(arrival.at)
        self.book.of(arrival.user_id).requests += 1
        self.book.began(arrival.at)
        if arrival.refused:
            self.book.of(arrival.user_id).refused[arrival.refused] += 1
        elif arrival.waited_seconds is not None:
            self._waiting += 1
            self._serial += 1
            dispatched = arrival.at + arrival.waited_seconds
            heapq.heappush(self._dispatches, (dispatched, self._serial, arrival))
        else:
            self.book.of(arrival.user_id).left += 1

    def _until(self, when: float) -> None:
        while self._dispatches and self._dispatches[0][0] <= when:
            at, _, arrival = heapq.heappop(self._dispatches)
            self._waiting -= 1
            tokens = arrival.prompt_tokens + (arrival.completion_tokens or 0)
            tally = self.book.of(arrival.user_id)
            tally.serve(tokens, arrival.waited_seconds or 0.0, contended=self._waiting > 0)
            seconds = arrival.service_seconds or 0.0
            if arrival.backend_id is not None:
                self.book.busy[arrival.backend_id] += seconds
            self.book.ended(at + seconds)

    def result(self) -> dict[str, Any]:
        """See ``TallyBook.result``."""
        self._until(float("inf"))
        return self.book.result(self._scenario.backends)


def recording(arrivals: Iterable[Arrival], recorded: Recorded) -> Iterator[Arrival]:
    """Pass the records on, having counted them."""
    for arrival in arrivals:
        recorded.add(arrival)
        yield arrival


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """How far two results are apart: the largest difference of a group's share (a fraction), and
    of the median and 95 % wait of all requests, in seconds."""
    names = {*one["groups"], *other["groups"]}
    shares = [abs(_of(one, name, "share") - _of(other, name, "share")) for name in names]
    return {
        "share": max(shares, default=0.0),
        "p50": abs(one["total"]["p50"] - other["total"]["p50"]),
        "p95": abs(one["total"]["p95"] - other["total"]["p95"]),
    }


def _of(result: Mapping[str, Any], group: str, name: str) -> float:
    return float(result["groups"].get(group, {}).get(name) or 0.0)
