"""A backend that polls cannot reach is treated like one that has failed (P5)."""

from __future__ import annotations

from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Telemetry, UserSpec
from scheduler.core.scheduler import Scheduler, Ticket
from scheduler.core.tunables import Tunables

ADA = UserSpec(user_id=1, username="ada", group_id=1, group_name="g", weight=1.0, group_weight=1.0)


def backend(number: int) -> BackendSpec:
    return BackendSpec(
        backend_id=number,
        name=f"b{number}",
        address=f"http://b{number}",
        max_concurrent=4,
        max_queue=4,
        models={"m": ModelSpec(name="m")},
    )


def scheduler(*numbers: int) -> Scheduler:
    made = Scheduler(Tunables())
    made.configure(
        tunables=Tunables(),
        users={1: ADA},
        backends=[backend(n) for n in numbers],
        strategies={},
        now=0.0,
    )
    return made


def served(core: Scheduler, now: float) -> Ticket:
    ticket = core.submit(
        Job(request_id=str(now), user_id=1, unit=1, model_name="m", prompt_tokens=1), now
    )
    core.pump(now)
    return ticket


def state_of(core: Scheduler, number: int, now: float) -> str:
    return next(view.state for view in core.backend_states(now) if view.id == number)


def test_an_unreachable_backend_is_passed_over_for_a_reachable_one() -> None:
    core = scheduler(1, 2)
    core.observe(1, Telemetry(observed_at=1.0, reachable=False))
    chosen = {served(core, 2.0 + n / 10).lease.backend_id for n in range(4)}
    assert chosen == {2}
    assert state_of(core, 1, 2.5) == "down"


def test_the_only_backend_is_tried_although_polls_do_not_reach_it() -> None:
    core = scheduler(1)
    core.observe(1, Telemetry(observed_at=1.0, reachable=False))
    ticket = served(core, 2.0)
    assert ticket.lease is not None
    assert ticket.lease.decision.reason == "fail_open"


def test_a_success_outweighs_the_poll_before_it_but_not_the_one_after() -> None:
    core = scheduler(1, 2)
    core.observe(1, Telemetry(observed_at=1.0, reachable=False))
    core.mark_ok(1, 2.0)
    assert state_of(core, 1, 2.0) == "ready"
    core.observe(1, Telemetry(observed_at=3.0, reachable=False))
    assert state_of(core, 1, 3.0) == "down"


def test_a_bad_poll_is_forgotten_when_it_is_stale() -> None:
    core = scheduler(1, 2)
    core.observe(1, Telemetry(observed_at=1.0, reachable=False))
    core.pump(32.0)
    assert state_of(core, 1, 32.0) == "unknown"
    assert {served(core, 32.0 + n / 10).lease.backend_id for n in range(2)} == {1, 2}
