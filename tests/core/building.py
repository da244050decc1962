"""Short ways to say what a test of the core is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from scheduler.core.jobs import (
    TASKS,
    BackendSpec,
    Job,
    ModelSpec,
    Needs,
    Strategy,
    Telemetry,
    Unit,
    Usage,
    UserSpec,
)
from scheduler.core.scheduler import Lease, Scheduler, Ticket
from scheduler.core.tunables import Tunables

_numbers = count(1)


def user(
    user_id: int, weight: float = 1.0, group: str | None = "students", **values: Any
) -> UserSpec:
    defaults: dict[str, Any] = {
        "username": f"user{user_id}",
        "group_id": None if group is None else sum(group.encode()),
        "group_name": group,
        "group_weight": weight,
    }
    return UserSpec(user_id=user_id, weight=weight, **(defaults | values))


def backend(
    backend_id: int,
    slots: int = 1,
    models: Sequence[str] | Mapping[str, ModelSpec] = ("m",),
    **values: Any,
) -> BackendSpec:
    if not isinstance(models, Mapping):
        models = {name: ModelSpec(name=name) for name in models}
    defaults: dict[str, Any] = {
        "name": f"backend{backend_id}",
        "address": f"127.0.0.1:{8000 + backend_id}",
        "max_queue": 1000,
    }
    return BackendSpec(
        backend_id=backend_id, max_concurrent=slots, models=models, **(defaults | values)
    )


def job(user_id: int, model_name: str = "m", prompt: int = 100, **values: Any) -> Job:
    number = next(_numbers)
    defaults: dict[str, Any] = {"request_id": f"r{number}", "unit": user_id}
    return Job(
        user_id=user_id,
        model_name=model_name,
        prompt_tokens=prompt,
        **(defaults | values),
    )


class Bench:
    """A scheduler with its configuration at hand, and a clock that the test moves."""

    def __init__(
        self,
        users: Sequence[UserSpec],
        backends: Sequence[BackendSpec],
        strategies: Mapping[str, Strategy] | None = None,
        **tunables: Any,
    ) -> None:
        self.now = 1000.0
        self.users = {spec.user_id: spec for spec in users}
        self.backends = list(backends)
        self.strategies: dict[str, Strategy] = dict(strategies or {})
        self.tunables = Tunables(**tunables)
        self.core = Scheduler(self.tunables)
        self._leases: list[Lease] = []
        self._tickets: list[Ticket] = []
        self.configure()

    def configure(self, **tunables: Any) -> None:
        if tunables:
            self.tunables = Tunables(**tunables)
        self.core.configure(
            tunables=self.tunables,
            users=self.users,
            backends=self.backends,
            strategies=self.strategies,
            now=self.now,
        )

    def submit(
        self, user_id: int, model_name: str = "m", prompt: int = 100, **values: Any
    ) -> Ticket:
        ticket = self.core.submit(job(user_id, model_name, prompt, **values), self.now)
        self._tickets.append(ticket)
        return ticket

    def pump(self) -> list[Ticket]:
        changed = self.core.pump(self.now)
        self._leases += [ticket.lease for ticket in changed if ticket.lease is not None]
        return changed

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.state == "queued"]

    def running(self, user_id: int) -> list[Lease]:
        """The user's open leases, oldest first."""
        return [x for x in self._leases if x.open and x.ticket.job.user_id == user_id]

    def serve(self, user_id: int, model_name: str = "m", prompt: int = 100, **values: Any) -> Lease:
        """Submit a job that must be served at once."""
        ticket = self.submit(user_id, model_name, prompt, **values)
        assert ticket in self.pump()
        return lease_of(ticket)

    def settle(self, lease: Lease, prompt: int = 100, completion: int = 0, **values: Any) -> Any:
        usage = Usage(prompt_tokens=prompt, completion_tokens=completion, **values)
        return self.core.settle(lease, usage, self.now)

    def observe(self, backend_id: int, **values: Any) -> None:
        self.core.observe(backend_id, Telemetry(**({"observed_at": self.now} | values)))

    def share(self, unit: Unit) -> Any:
        """The unit's ``ShareView``."""
        return next(view for view in self.core.shares(self.now) if view.unit == unit)

    def state_of(self, backend_id: int) -> Any:
        """The backend's ``BackendView``."""
        return next(v for v in self.core.backend_states(self.now) if v.id == backend_id)

    def in_flight(self) -> int:
        return sum(view.in_flight for view in self.core.backend_states(self.now))


def lease_of(ticket: Ticket) -> Lease:
    assert ticket.lease is not None, ticket.state
    return ticket.lease


def needs(**values: bool) -> Needs:
    """By the names of capabilities."""
    tasks = [name for name in TASKS if values.pop(name, False)]
    return Needs(**values, task=tasks[0] if tasks else None)


def serve_until(
    bench: Bench, tokens: float, costs: Mapping[Any, int], depth: int = 16
) -> dict[Any, float]:
    """Keep ``depth`` jobs of each unit unfinished until so many tokens are served in all.

    ``costs`` are the true prompt tokens of each unit's jobs. Returns {unit: tokens}.
    """

    def submit(unit: Any) -> None:
        user_id = unit[0] if isinstance(unit, tuple) else unit
        bench.submit(user_id, unit=unit, prompt=costs[unit], max_tokens=0)

    served = dict.fromkeys(costs, 0.0)
    for unit in costs:
        for _ in range(depth):
            submit(unit)
    running: list[Ticket] = bench.pump()
    while sum(served.values()) < tokens:
        ticket = running.pop(0)
        bench.now += 0.01
        unit = ticket.job.unit
        served[unit] += costs[unit]
        bench.settle(lease_of(ticket), costs[unit])
        submit(unit)
        running += bench.pump()
    return served
