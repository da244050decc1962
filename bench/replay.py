"""How many recorded requests a second are replayed, and how much memory that takes.

.venv/bin/python bench/replay.py [--requests 200000] [--users 2000]
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decisions import call_ns
from scheduler.core.jobs import BackendSpec, ModelSpec, UserSpec
from scheduler.core.tunables import Tunables
from scheduler.simulation import Arrival, Replay, Scenario

SLOTS, BACKENDS = 32, 4
MEAN_SECONDS = 5.0


def scenario(users: int) -> Scenario:
    groups = ("student", "staff", "faculty")
    return Scenario(
        tunables=Tunables(),
        users={
            n: UserSpec(
                user_id=n,
                username=f"u{n}",
                group_id=n % 3,
                group_name=groups[n % 3],
                weight=1.0 + n % 3,
                group_weight=1.0 + n % 3,
            )
            for n in range(users)
        },
        backends=[
            BackendSpec(
                backend_id=n,
                name=f"b{n}",
                address=f"127.0.0.1:{9000 + n}",
                max_concurrent=SLOTS,
                max_queue=1000,
                models={name: ModelSpec(name=name) for name in ("m", f"only-{n % 2}")},
            )
            for n in range(BACKENDS)
        ],
    )


def traffic(requests: int, users: int, load: float) -> Iterator[Arrival]:
    """Poisson arrivals at ``load`` times what the slots serve."""
    chance = random.Random(1)
    at, rate = 0.0, load * SLOTS * BACKENDS / MEAN_SECONDS
    for _ in range(requests):
        at += chance.expovariate(rate)
        user = int(users * chance.random() ** 3)  # a few do most
        yield Arrival(
            at=at,
            user_id=user,
            unit=user,
            model_name=("m", "m", "only-0", "only-1")[chance.randrange(4)],
            prompt_tokens=chance.randrange(50, 2000),
            completion_tokens=chance.randrange(20, 600),
            service_seconds=chance.expovariate(1 / MEAN_SECONDS),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--users", type=int, default=2_000)
    arguments = parser.parse_args()
    print(f"one function call on this machine: {call_ns():.0f} ns")
    for load in (0.5, 0.95, 1.1):
        arrivals = list(traffic(min(arguments.requests, 100_000), arguments.users, load))
        started = time.process_time()
        replay = Replay(scenario(arguments.users))
        for _ in replay.run(arrivals):
            pass
        seconds = time.process_time() - started
        waits = replay.result()["total"]
        print(
            f"load {load:4.2f}: {len(arrivals) / seconds:8,.0f} requests/s of CPU, "
            f"p95 wait {waits['p95']:6.2f} s, refused {sum(waits['refused'].values()):,}"
        )
    replay, started = Replay(scenario(arguments.users)), time.process_time()
    for _ in replay.run(traffic(arguments.requests, arguments.users, 0.95)):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"streamed {arguments.requests:,}: {time.process_time() - started:.1f} s, {peak:.0f} MiB")


if __name__ == "__main__":
    main()
