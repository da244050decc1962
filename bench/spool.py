"""CPU cost of a record and its start marker on the event loop (target: ≤ 8 µs, writes aside):
``-m bench.spool``."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from scheduler.core.decisions import Decision
from scheduler.spool import Attempt, Record, Spool

ROUNDS = 50_000
DECISION = Decision(
    selected_backend_id=1,
    points=[(number, (100.0, 25.0, 20.0, 5.0, 10.0, 0.0, 0.0)) for number in (1, 2, 3)],
    failures=(),
    reason="score",
    user_deficit=-1000.0,
    user_weight=3.0,
    user_group="faculty",
    user_recent_usage=30000.0,
    burst_credits=0.0,
    factor=1.0,
    wait_bonus=0.25,
    priority=-333.0,
    position_at_arrival=1,
    wait_reason="none",
    ahead={},
    names={1: "gpu-1", 2: "gpu-2", 3: "gpu-3"},
)


def record(number: int) -> Record:
    """A completed request as most are: three candidates, one attempt."""
    now = time.time()
    return Record(
        request_id=f"{number:032x}",
        arrived_at=now,
        user_id=7,
        user="ada",
        group="faculty",
        model_requested="llama3.2",
        model_served="llama3.2",
        dialect="openai",
        endpoint="chat.completions",
        stream=True,
        status=200,
        outcome="completed",
        selected_backend_id=1,
        selected_backend="gpu-1",
        decision=DECISION,
        attempts=[Attempt(backend="gpu-1", status=200, started_at=now, ended_at=now)],
        wait_reason="none",
        position_at_arrival=1,
        prompt_tokens=60,
        completion_tokens=37,
        charged_tokens=97.0,
        queued_at=now,
        dispatched_at=now,
        first_byte_at=now,
        first_token_at=now,
        ended_at=now,
        configuration_version=12,
    )


def measure(spool: Spool) -> float:
    """CPU microseconds per request: open, mark and close."""
    records = [record(number) for number in range(ROUNDS)]
    start = time.process_time()
    for one in records:
        spool.open(one)
        spool.mark(one)
        spool.flush()
        spool.close(one)
    return (time.process_time() - start) / ROUNDS * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder))
        whole = measure(spool)
        spool.stop()
        handed_on = os.write
        os.write = lambda handle, data: len(data)
        try:
            spool = Spool(Path(folder))
            python = measure(spool)
        finally:
            os.write = handed_on
        spool.stop()
    print(f"open + mark + close: {whole:.1f} µs with the writes, {python:.1f} µs without")


if __name__ == "__main__":
    main()
