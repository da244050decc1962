"""What ``manage.py doctor`` looks at, one small check each, and what it says to do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import redis
from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.models import Max
from django.utils import timezone
from kombu.exceptions import ChannelError, KombuError

from backends.models import Backend, BackendStatus
from backends.services import detect_engines
from mindrouter.celery import app
from scheduler import compiled, pulse
from scheduler.advising import advice

State = Literal["ok", "warning", "problem"]
_FREE_BYTES = 1 << 30
_BACKLOG_BYTES = 10 << 20
_CLOCK_SECONDS = 2.0
_POLLS_SECONDS = 30.0
_RECORDER_SECONDS = 30.0
_WAIT_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look came to; ``do`` is empty where nothing is wrong."""

    about: str
    state: State
    what: str
    do: str = ""


def examine() -> Iterator[Finding]:
    """Every check in turn; what needs the database is left out while that is away."""
    for look in (_settings, _core, _data_folder, _database):
        yield from look()
    if not _has_tables():
        return
    for look in (_processes, _redis, _broker, _polls, _recorder, _clock, _backends, _advice):
        yield from look()


def _settings() -> Iterator[Finding]:
    found = run_checks()
    for one in found:
        state: State = "problem" if one.level >= ERROR else "warning"
        yield Finding("settings", state, str(one.msg), one.hint or "Set it, and start again.")
    if not found:
        yield Finding("settings", "ok", "every value is valid")


def _core() -> Iterator[Finding]:
    what = "machine code" if compiled.in_use() else "Python; make compile makes it faster"
    yield Finding("scheduling core", "ok", what)


def _data_folder() -> Iterator[Finding]:
    folder = settings.DATA_DIR
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        who = "Run this, and the router, as the folder's owner."
        yield Finding("data folder", "problem", f"{folder} cannot be written", who)
    elif free < _FREE_BYTES:
        what = f"{free >> 20} MiB are left on the disk of {folder}"
        yield Finding("data folder", "warning", what, "Make room: without it no record is kept.")
    else:
        yield Finding("data folder", "ok", f"{folder}, {free >> 30} GiB free")


def _database() -> Iterator[Finding]:
    began = time.monotonic()
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as error:
        what = f"it does not answer: {str(error).strip()}"
        yield Finding("database", "problem", what, "Start it, or correct DATABASE_URL.")
        return
    if plan:
        what = f"{len(plan)} migrations are not applied"
        yield Finding("database", "problem", what, "Run manage.py migrate, then start again.")
        return
    took = 1000 * (time.monotonic() - began)
    yield Finding("database", "ok", f"{connection.vendor}, looked through in {took:.0f} ms")


def _has_tables() -> bool:
    try:
        return Backend._meta.db_table in connection.introspection.table_names()
    except DatabaseError:
        return False


def _processes() -> Iterator[Finding]:
    """Of this data folder; other machines, and containers, have theirs."""
    alive = pulse.pulses()
    kinds = {one.kind for one in alive}
    wanted = ["gateway"]
    # One of another machine is none of this one's, whose gateway says whether it is in touch.
    if settings.REDIS_URL and ("gateway" not in kinds or pulse.has_been_here("scheduler")):
        wanted.append("scheduler")
    for kind in wanted:
        those = [one for one in alive if one.kind == kind]
        command = {"gateway": "rungateway", "scheduler": "runscheduler"}[kind]
        if not those:
            what = f"none runs on {settings.DATA_DIR}"
            yield Finding(kind, "problem", what, f"Start it: manage.py start, or {command}.")
        for one in those:
            yield _process(one)


def _process(one: pulse.Pulse) -> Finding:
    name = f"process {one.pid}"
    if one.unwritten or one.lines_lost:
        what = f"{name} could not write {one.unwritten} records and lost {one.lines_lost}"
        return Finding(one.kind, "problem", what, "Make room on the disk of the data folder.")
    if not one.in_touch:
        what = f"{name} does not reach the scheduler"
        return Finding(one.kind, "problem", what, "See whether runscheduler and Redis run.")
    if one.database_away:
        what = f"{name} does not reach the database"
        return Finding(one.kind, "problem", what, "Start the database; records wait until then.")
    return Finding(one.kind, "ok", f"{name} serves {one.serving} requests")


def _redis() -> Iterator[Finding]:
    if not settings.REDIS_URL:
        return
    try:
        with _connected() as client:
            client.ping()
            yield Finding("redis", "ok", f"version {client.info('server')['redis_version']}")
    except redis.RedisError as error:
        yield Finding("redis", "problem", str(error), "Start it, or correct REDIS_URL.")


def _connected() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=_WAIT_SECONDS)


def _broker() -> Iterator[Finding]:
    """How much work waits for the worker: beat brings some each second."""
    try:
        with app.connection(connect_timeout=_WAIT_SECONDS) as broker:
            name = app.conf.task_default_queue
            channel: Any = broker.default_channel
            waiting = channel.queue_declare(name, passive=True).message_count
    except (ChannelError, KombuError, OSError, redis.RedisError) as error:
        if "NOT_FOUND" in str(error) or isinstance(error, FileNotFoundError):
            yield Finding("broker", "ok", "nothing waits for the worker")
            return
        what = f"it does not answer: {error}"
        yield Finding("broker", "problem", what, "Start Redis, or mend the data folder's celery/.")
        return
    if waiting > _POLLS_SECONDS:
        what = f"{waiting} tasks wait for the worker"
        do = "See whether it runs: celery -A mindrouter worker."
        yield Finding("worker", "problem", what, do)
    else:
        yield Finding("broker", "ok", f"{waiting} tasks wait for the worker")


def _polls() -> Iterator[Finding]:
    """Beat and worker together: does anything get polled?"""
    enabled = Backend.objects.filter(enabled=True)
    longest = enabled.aggregate(longest=Max("poll_interval"))["longest"]
    if longest is None and not enabled.exists():
        return
    last = BackendStatus.objects.aggregate(last=Max("attempted_at"))["last"]
    age = None if last is None else (timezone.now() - last).total_seconds()
    patience = _POLLS_SECONDS + float(longest or settings.BACKEND_POLL_INTERVAL)
    if age is None or age > patience:
        what = "no backend was ever polled" if age is None else f"the last poll was {age:.0f} s ago"
        do = "See whether both run: celery -A mindrouter beat, and … worker."
        yield Finding("beat and worker", "problem", what, do)
    else:
        yield Finding("beat and worker", "ok", f"the last poll was {age:.0f} s ago")


def _recorder() -> Iterator[Finding]:
    recorder = pulse.recorder_pulse()
    backlog = pulse.spool_backlog(recorder)
    lag = None if recorder is None else time.time() - recorder.caught_up_at
    if lag is None or lag > _RECORDER_SECONDS:
        since = "it has never run here" if lag is None else f"it is {lag:.0f} s behind"
        do = "See whether it runs, and what its log says: manage.py runrecorder."
        yield Finding("recorder", "problem", f"{since}, {backlog >> 10} KiB wait", do)
    elif backlog > _BACKLOG_BYTES:
        what = f"{backlog >> 20} MiB wait in the spool"
        yield Finding("recorder", "warning", what, "See whether the database is slow.")
    else:
        yield Finding("recorder", "ok", f"{backlog >> 10} KiB wait in the spool")


def _clock() -> Iterator[Finding]:
    others = list(_clocks())
    for name, ahead in others:
        if abs(ahead) > _CLOCK_SECONDS:
            what = f"{name}'s is {ahead:+.1f} s from this machine's"
            yield Finding("clock", "problem", what, "Let both follow NTP: limits go by the clock.")
    if all(abs(ahead) <= _CLOCK_SECONDS for _, ahead in others):
        names = " and ".join(name for name, _ in others) or "nothing else to compare with"
        yield Finding("clock", "ok", names)


def _clocks() -> Iterator[tuple[str, float]]:
    """(whose, seconds ahead of ours)"""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
            yield "the database", float(cursor.fetchone()[0]) - time.time()
    if settings.REDIS_URL:
        try:
            with _connected() as client:
                seconds, micros = client.time()
                yield "Redis", seconds + micros / 1e6 - time.time()
        except redis.RedisError:
            return


def _backends() -> Iterator[Finding]:
    """Each that is enabled is asked now."""
    rows = list(Backend.objects.filter(enabled=True).order_by("name"))
    if not rows:
        do = "Add one: /admin/backends/backend/, or manage.py apply."
        yield Finding("backends", "warning", "none is enabled", do)
        return
    found = detect_engines(rows)
    for row in rows:
        result, about = found[row.pk], f"backend {row.name}"
        if result.observation is None:
            what = f"{row.base_url} does not answer: {result.error}"
            do = "See whether it runs, and whether the address and its key are right."
            yield Finding(about, "problem", what, do)
        else:
            slots = result.observation.slots
            runs = "an unknown number" if slots is None else str(slots)
            what = f"{result.engine}; runs {runs} at once, is sent {row.max_concurrent}"
            yield Finding(about, "ok", what)


def _advice() -> Iterator[Finding]:
    for one in advice():
        if one.weight != "hint":
            yield Finding(one.subject, one.weight, f"{one.what} {one.why}", one.do)
