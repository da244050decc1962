"""CPU time of the scheduling core, in microseconds per request.

    .venv/bin/python bench/decisions.py [--cycles 2000]

*idle*: submit → pump → settle while slots are free: what scheduling adds to a request's way.
*queued*: settle → submit → pump with so many users, one job of each waiting: a full decision.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler import compiled
from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage, UserSpec
from scheduler.core.scheduler import Lease, Scheduler, Ticket
from scheduler.core.tunables import Tunables

SIZES = (10, 100, 1_000, 10_000, 100_000)
SLOTS = 32
BACKENDS = 2
ROUNDS = 10
USAGES = [Usage(prompt_tokens=60, completion_tokens=20 + n % 300) for n in range(997)]


def scheduler_with(users: int, queue: int) -> Scheduler:
    tunables = Tunables()
    scheduler = Scheduler(tunables)
    scheduler.configure(
        tunables=tunables,
        users={
            user_id: UserSpec(
                user_id=user_id,
                username=f"u{user_id}",
                group_id=user_id % 3,
                group_name=("student", "staff", "faculty")[user_id % 3],
                weight=1.0 + user_id % 3,
                group_weight=1.0 + user_id % 3,
            )
            for user_id in range(users)
        },
        backends=[
            BackendSpec(
                backend_id=number,
                name=f"b{number}",
                address=f"127.0.0.1:{9000 + number}",
                max_concurrent=SLOTS,
                max_queue=queue,
                models={"m": ModelSpec(name="m")},
            )
            for number in range(1, BACKENDS + 1)
        ],
        strategies={},
        now=0.0,
    )
    return scheduler


def job(number: int, user_id: int) -> Job:
    return Job(
        request_id=str(number),
        user_id=user_id,
        unit=user_id,
        model_name="m",
        prompt_tokens=50 + number * 37 % 400,
        max_tokens=None,
    )


def idle_cycle(users: int, cycles: int) -> float:
    """µs per request with an idle cluster."""
    scheduler = scheduler_with(users, 16)

    def cycle(number: int, one: Job) -> None:
        now = number * 0.001
        scheduler.submit(one, now)
        (ticket,) = scheduler.pump(now)
        scheduler.settle(lease_of(ticket), USAGES[number % len(USAGES)], now + 0.0005)

    return timed(cycle, users, cycles)


def queued_cycle(users: int, cycles: int) -> float:
    """µs per request with one waiting job of every user."""
    scheduler = scheduler_with(users, users + 100)
    for number in range(BACKENDS * SLOTS):
        scheduler.submit(job(number, number % users), 0.0)
    running = [lease_of(ticket) for ticket in scheduler.pump(0.0)]
    for number in range(users):
        scheduler.submit(job(number, number), 0.0)
    scheduler.pump(0.0)

    def cycle(number: int, one: Job) -> None:
        now = 0.001 + number * 0.001
        slot = number % len(running)
        scheduler.settle(running[slot], USAGES[number % len(USAGES)], now)
        scheduler.submit(one, now)
        (ticket,) = scheduler.pump(now)
        running[slot] = lease_of(ticket)

    return timed(cycle, users, cycles)


def lease_of(ticket: Ticket) -> Lease:
    if ticket.lease is None:
        raise SystemExit(f"{ticket.job.request_id} was not served: {ticket.error}")
    return ticket.lease


def timed(cycle: Callable[[int, Job], None], users: int, cycles: int) -> float:
    """The least of several rounds: what else the machine does can only add."""
    jobs = [job(number, number * 7919 % users) for number in range(cycles * (ROUNDS + 1))]
    rounds: list[float] = []
    for round_number in range(ROUNDS + 1):  # the first one warms up
        first = round_number * cycles
        started = time.process_time()
        for number in range(first, first + cycles):
            cycle(number, jobs[number])
        rounds.append((time.process_time() - started) / cycles * 1e6)
    return min(rounds[1:])


def call_ns() -> float:
    """What one Python function call takes here and now, to compare machines by."""

    def call(a: int, b: int) -> int:
        return a + b

    rounds: list[float] = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for number in range(50_000):
            call(number, number)
        rounds.append((time.process_time() - started) / 50_000 * 1e9)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=2_000)
    cycles = parser.parse_args().cycles
    print("the core is", "machine code" if compiled.in_use() else "Python")
    print(f"one function call on this machine: {call_ns():.0f} ns")
    for users in (10, 10_000):
        print(f"idle    {users:>7,} users  {idle_cycle(users, cycles):6.1f} µs")
    least = 0.0
    for users in SIZES:
        gc.collect()
        taken = queued_cycle(users, cycles)
        least = least or taken
        print(f"queued  {users:>7,} users  {taken:6.1f} µs  {taken / least:4.1f} ×")


if __name__ == "__main__":
    main()
