"""How what one scheduler costs grows, and what fairness remains where several share a site.

    python -m bench.cells [--seconds 300]

First CPU per queued request by users and by backends, from ``bench/decisions.py``. Then cells: the
site's slots and weights divided among schedulers that know nothing of each other. Everybody always
has requests waiting; printed is how far the share of tokens of the worst-off and the best-off user
is from what the weights entitle to, and the largest gap between two users in tokens per weight.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import decisions
from scheduler.core.jobs import BackendSpec, Job, ModelSpec, Usage, UserSpec
from scheduler.core.scheduler import Scheduler
from scheduler.core.tunables import Tunables

SLOTS = 64  # of all cells together
USERS = 30
WARM_UP = 0.1  # part of the time that is not counted

#: The cell for a user's next request, given how many the user has in each.
Choice = Callable[[int, Counter[int], int], int]


def weight(user: int) -> int:
    return 1 + user % 3


def pinned(user: int, mine: Counter[int], cells: int) -> int:
    """Every user has one cell."""
    return user * 7919 // 3 % cells


def _pack(cells: int) -> list[int]:
    """{user: cell}, the weights of all cells as equal as the largest first makes them."""
    loads = [0] * cells
    found = [0] * USERS
    for user in sorted(range(USERS), key=weight, reverse=True):
        found[user] = loads.index(min(loads))
        loads[found[user]] += weight(user)
    return found


_PACKED = {cells: _pack(cells) for cells in (1, 2, 4, 8)}


def packed(user: int, mine: Counter[int], cells: int) -> int:
    """Every user has one cell, and all cells have the same weight as far as users can be dealt."""
    return _PACKED[cells][user]


def anywhere(user: int, mine: Counter[int], cells: int) -> int:
    return random.randrange(cells)


def spread(user: int, mine: Counter[int], cells: int) -> int:
    """Where the user has least."""
    return min(range(cells), key=lambda cell: (mine[cell], random.random()))


def cell_of(slots: int) -> Scheduler:
    scheduler = Scheduler(Tunables())
    scheduler.configure(
        tunables=Tunables(),
        users={
            user: UserSpec(
                user_id=user,
                username=f"u{user}",
                group_id=user,
                group_name=f"g{user}",
                weight=float(weight(user)),
                group_weight=float(weight(user)),
                max_wait_seconds=float("inf"),
            )
            for user in range(USERS)
        },
        backends=[
            BackendSpec(
                backend_id=1,
                name="b",
                address="127.0.0.1:9001",
                max_concurrent=slots,
                max_queue=100_000,
                models={"m": ModelSpec(name="m")},
            )
        ],
        strategies={},
        now=0.0,
    )
    return scheduler


def simulate(
    cells: int, outstanding: int, choose: Choice, seconds: float
) -> tuple[Counter[int], float]:
    """Tokens of each user while all keep so many requests outstanding; the sum of the bounds that
    the cells guarantee (T1), in tokens per weight."""
    random.seed(7)
    schedulers = [cell_of(SLOTS // cells) for _ in range(cells)]
    where: dict[int, Counter[int]] = {user: Counter() for user in range(USERS)}
    ends: list[tuple[float, int, int, int, object, int]] = []
    served: Counter[int] = Counter()
    numbers = count()
    touched: set[int] = set()

    def submit(user: int, now: float) -> None:
        cell = choose(user, where[user], cells)
        where[user][cell] += 1
        request_id = f"{next(numbers)}"
        one = Job(request_id=request_id, user_id=user, unit=user, model_name="m", prompt_tokens=100)
        schedulers[cell].submit(one, now)
        touched.add(cell)

    def pump(now: float) -> None:
        while touched:
            cell = touched.pop()
            for ticket in schedulers[cell].pump(now):
                tokens = random.randint(50, 400)
                end = now + tokens / 100
                heapq.heappush(
                    ends, (end, next(numbers), cell, ticket.job.user_id, ticket.lease, tokens)
                )

    for user in range(USERS):
        for _ in range(outstanding):
            submit(user, 0.0)
    pump(0.0)
    while ends and ends[0][0] < seconds:
        now, _, cell, user, lease, tokens = heapq.heappop(ends)
        usage = Usage(prompt_tokens=100, completion_tokens=tokens)
        schedulers[cell].settle(lease, usage, now)  # type: ignore[arg-type]
        where[user][cell] -= 1
        touched.add(cell)
        if now > seconds * WARM_UP:
            served[user] += 100 + tokens
        submit(user, now)
        pump(now)
    return served, sum(one.service_gap(seconds)[1] for one in schedulers)


def report(cells: int, outstanding: int, choose: Choice, seconds: float) -> None:
    served, bound = simulate(cells, outstanding, choose, seconds)
    total, weights = sum(served.values()), sum(map(weight, range(USERS)))
    errors = [served[u] / total / (weight(u) / weights) - 1 for u in range(USERS)]
    per_weight = [served[user] / weight(user) for user in range(USERS)]
    print(
        f"{choose.__name__:9} {cells:5} {outstanding:12} {min(errors):+11.1%} {max(errors):+11.1%}"
        f" {max(per_weight) - min(per_weight):10,.0f} {bound:10,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    seconds = parser.parse_args().seconds
    print(f"one function call on this machine: {decisions.call_ns():.0f} ns")
    for users in (100, 1_000, 10_000, 100_000):
        print(f"queued {users:>7,} users     {decisions.queued_cycle(users, 500):7.1f} µs")
    for backends in (2, 8, 32, 128):
        decisions.BACKENDS = backends
        print(f"queued {backends:>7,} backends  {decisions.queued_cycle(1_000, 500):7.1f} µs")
    print("\ncells     cells  outstanding   worst off    best off        gap  its bound")
    for outstanding in (16, 4):
        report(1, outstanding, anywhere, seconds)
        for choose in (spread, packed, anywhere, pinned):
            for cells in (2, 4, 8):
                report(cells, outstanding, choose, seconds)


if __name__ == "__main__":
    main()
