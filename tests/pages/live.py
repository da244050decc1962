"""A real scheduler for the tests of pages, and what a page would see of it."""

from __future__ import annotations

from accounts.models import User
from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage
from scheduler.core.scheduler import Scheduler
from scheduler.core.tickets import Lease
from scheduler.core.tunables import Tunables
from scheduler.serving import LiveView
from scheduler.snapshot import load_snapshot


class Cluster:
    """The core scheduler over the database's users and one backend with ``slots`` slots."""

    def __init__(self, slots: int, **tunables: float | str) -> None:
        self._now = 0.0
        values = Tunables(**tunables)
        backend = BackendSpec(
            backend_id=1,
            name="gpu-1",
            address="http://gpu-1",
            max_concurrent=slots,
            max_queue=1000,
            models={"m": ModelSpec(name="m")},
        )
        self.scheduler = Scheduler(values)
        self.scheduler.configure(
            tunables=values,
            users=load_snapshot().users,
            backends=[backend],
            strategies={},
            now=0.0,
        )

    def ask(self, user: User, jobs: int = 1) -> list[Lease]:
        """``user`` sends requests; those that got a slot at once."""
        for number in range(jobs):
            job = Job(
                request_id=f"{user.username}-{number}",
                user_id=user.pk,
                unit=user.pk,
                model_name="m",
                prompt_tokens=10,
                max_tokens=100,
            )
            self.scheduler.submit(job, self._now)
        return [ticket.lease for ticket in self.scheduler.pump(self._now) if ticket.lease]

    def settle(self, lease: Lease, tokens: int) -> None:
        usage = Usage(prompt_tokens=10, completion_tokens=tokens - 10)
        self.scheduler.settle(lease, usage, self._now)

    def view(self) -> LiveView:
        gap, bound = self.scheduler.service_gap(self._now)
        return LiveView(
            taken_at=0.0,
            stats=self.scheduler.stats(self._now),
            backends=self.scheduler.backend_states(self._now),
            shares=self.scheduler.shares(self._now),
            gap=gap,
            gap_bound=bound,
            configuration_version=1,
        )
