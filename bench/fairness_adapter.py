"""Puts the real scheduling core under the fairness bench's simulator.

    python3 run.py --adapter bench/fairness_adapter.py:Adapter

The simulator owns time, slots and backends; this only translates its calls. Every rule measured is
the core's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage, UserSpec
from scheduler.core.scheduler import Lease, Scheduler
from scheduler.core.tunables import Tunables

_UNLIMITED = 10**9


class Adapter:
    wants_progress = True
    tick_every = None

    def configure(self, users: dict[Any, dict[str, Any]], classes: dict[str, list[int]]) -> None:
        self._user_ids = {uid: number for number, uid in enumerate(users, start=1)}
        self._leases: dict[int, Lease] = {}
        self._scheduler = Scheduler(Tunables())
        self._scheduler.configure(
            tunables=Tunables(),
            users=dict(self._user_specs(users)),
            backends=_backend_specs(classes),
            strategies={},
            now=0.0,
        )

    def _user_specs(self, users: dict[Any, dict[str, Any]]) -> Any:
        groups = {g: n for n, g in enumerate(sorted({str(u.get("group")) for u in users.values()}))}
        for uid, user in users.items():
            user_id = self._user_ids[uid]
            yield (
                user_id,
                UserSpec(
                    user_id=user_id,
                    username=str(uid),
                    group_id=groups[str(user.get("group"))],
                    group_name=str(user.get("group")),
                    weight=float(user["weight"]),
                    group_weight=float(user.get("group_weight", user["weight"])),
                    max_wait_seconds=float("inf"),
                ),
            )

    def enqueue(self, now: float, job: Any) -> None:
        user_id = self._user_ids[job.uid]
        ticket = self._scheduler.submit(
            Job(
                request_id=str(job.jid),
                user_id=user_id,
                unit=user_id,
                model_name=job.cls,
                prompt_tokens=job.prompt,
                max_tokens=job.max_tokens,
            ),
            now,
        )
        ticket.owner = job

    def pick(self, now: float, ready: set[str]) -> Any:
        ticket = self._scheduler.dispatch_one(now, ready)
        if ticket is None:
            return None
        assert ticket.lease is not None  # noqa: S101
        self._leases[ticket.owner.jid] = ticket.lease
        return ticket.owner

    def progress(self, now: float, job: Any, out_tokens: float) -> None:
        self._scheduler.progress(self._leases[job.jid], job.prompt, int(out_tokens), now)

    def complete(self, now: float, job: Any, prompt_tokens: int, output_tokens: int) -> None:
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens)
        self._scheduler.settle(self._leases.pop(job.jid), usage, now)

    def after_dispatch(self, now: float, queued: int, running: int) -> None:
        self._scheduler.note_pass(now)


def _backend_specs(classes: dict[str, list[int]]) -> list[BackendSpec]:
    models: dict[int, dict[str, ModelSpec]] = {}
    for name, backend_ids in classes.items():
        for backend_id in backend_ids:
            models.setdefault(backend_id, {})[name] = ModelSpec(name=name)
    return [
        BackendSpec(
            backend_id=backend_id,
            name=f"b{backend_id}",
            address=f"b{backend_id}",
            max_concurrent=_UNLIMITED,
            max_queue=_UNLIMITED,
            models=offered,
        )
        for backend_id, offered in models.items()
    ]
