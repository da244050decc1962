"""What a load balancer and an operator ask: is it up, has it started, can it serve.

Answered from what the process knows already, and from small files: nothing here asks the database,
and nothing takes longer than ``FILES_SECONDS``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from mindrouter.gateway.client import Client, Headers
from scheduler import pulse
from scheduler.serving import Serving, current

_JSON: Headers = [(b"content-type", b"application/json")]
_UNREADY: Headers = [*_JSON, (b"retry-after", b"5")]
#: The recorder looks into the spool every quarter of a second.
RECORDER_LATE_SECONDS = 30.0
FILES_SECONDS = 2.0


class Check(NamedTuple):
    """One thing that was looked at. ``needed``: without it nothing can be served."""

    name: str
    ok: bool
    needed: bool
    figures: dict[str, Any]  # what was seen, in seconds and counts
    message: str = ""  # what is wrong, and where to look

    def as_json(self) -> dict[str, Any]:
        told = {"ok": self.ok, "needed": self.needed, **self.figures}
        return told if self.ok else told | {"message": self.message}


async def tell_alive(client: Client) -> None:
    """For load balancers: nothing new is to come here from the moment that shutdown begins."""
    serving = current()
    if serving is not None and serving.stopping:
        await client.respond(503, _UNREADY, b'{"status":"shutting down"}')
    else:
        await client.respond(200, _JSON, b'{"status":"ok"}')


async def tell_started(client: Client) -> None:
    """Whether the configuration is loaded and the scheduler has been heard of."""
    serving = current()
    if serving is None or not (serving.in_touch or serving.stopping):
        await client.respond(503, _UNREADY, b'{"status":"starting"}')
    else:
        await client.respond(200, _JSON, b'{"status":"started"}')


async def tell_ready(client: Client) -> None:
    """503 where a new request would not be served; else 200, and whether something is wrong."""
    checks = await _checks_of(current())
    ready = all(one.ok for one in checks if one.needed)
    whole = ready and all(one.ok for one in checks)
    status = "ready" if whole else "degraded" if ready else "not ready"
    told = {"status": status, "checks": {one.name: one.as_json() for one in checks}}
    await client.respond(
        200 if ready else 503, _JSON if ready else _UNREADY, json.dumps(told).encode()
    )


async def _checks_of(serving: Serving | None) -> list[Check]:
    """Everything that is looked at, the needed ones first."""
    if serving is None:
        return [Check("process", ok=False, needed=True, figures={}, message="It is starting.")]
    return [
        _process(serving),
        _scheduler(serving),
        _spool(serving),
        _database(serving),
        *_backends(serving),
        await _recorder_within(FILES_SECONDS),
    ]


def _process(serving: Serving) -> Check:
    why = "It is shutting down." if serving.stopping else "Background work has ended; see the log."
    ok = serving.is_whole and not serving.stopping
    return Check("process", ok, True, {"serving": len(serving.serving)}, why)


def _scheduler(serving: Serving) -> Check:
    why = "The scheduler does not answer: do runscheduler and Redis run?"
    return Check("scheduler", serving.in_touch, True, {}, why)


def _spool(serving: Serving) -> Check:
    """Requests are served while records wait in memory, until those would be lost."""
    spool = serving.spool
    figures = {"unwritten": spool.unwritten, "lost": spool.lines_lost}
    why = "Records cannot be written: is the disk of the data folder full?"
    return Check("spool", not spool.unwritten, spool.is_full, figures, why)


def _database(serving: Serving) -> Check:
    why = "The database is away: known keys work, changes and pages do not; records wait."
    return Check("database", not serving.database_away, False, {}, why)


def _backends(serving: Serving) -> Iterable[Check]:
    known = [one for one in serving.backends() if one.state != "disabled"]
    ages = [one.observed_age_seconds for one in known if one.observed_age_seconds is not None]
    youngest = min(ages, default=None)
    patience = 2.0 * serving.snapshot.tunables.backend_stale_after
    polled = not known or (youngest is not None and youngest <= patience)
    ready = sum(one.state == "ready" for one in known)
    yield Check(
        "polls",
        polled,
        False,
        {"youngest_age_seconds": youngest},
        "No backend has answered a poll of late: do the worker and beat run?",
    )
    yield Check(
        "backends",
        ready > 0 or not known,
        False,
        {"in_service": len(known), "ready": ready},
        "No backend is ready: see the list of backends.",
    )


async def _recorder_within(seconds: float) -> Check:
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(_recorder)
    except (TimeoutError, OSError) as error:  # by its name: anybody may ask, and it has the path
        why = f"The data folder cannot be read: {type(error).__name__}."
        return Check("recorder", False, False, {}, why)


def _recorder() -> Check:
    recorder = pulse.recorder_pulse()
    backlog = pulse.spool_backlog(recorder)
    lag = None if recorder is None else max(0.0, time.time() - recorder.caught_up_at)
    ok = lag is not None and lag <= RECORDER_LATE_SECONDS
    return Check(
        "recorder",
        ok,
        False,
        {"lag_seconds": lag, "backlog_bytes": backlog},
        "Records wait in the spool: does runrecorder run, and is the database there?",
    )


PROBES = {"/healthz": tell_alive, "/readyz": tell_ready, "/startupz": tell_started}
