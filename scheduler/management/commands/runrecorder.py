"""``manage.py runrecorder``: puts the records of the spool into the database, until stopped."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connection

from scheduler import pulse
from scheduler.captures import CAPTURES, load_captures
from scheduler.counting import COUNTS_FILE, load_counts, save_counts
from scheduler.loading import Loader
from scheduler.request_lines import log_requests
from scheduler.spool import Record
from scheduler.streaming import Stream, open_stream

if TYPE_CHECKING:
    from scheduler.tracing import Tracer

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.25
LONGEST_BACK_OFF_SECONDS = 2.0
IDLE_SECONDS = 60.0
TELL_SECONDS = 1.0


class Command(BaseCommand):
    help = "Load records from the spool into the database until SIGTERM or SIGINT."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        use_a_plain_connection()
        settings.SPOOL_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
        counting = Counting(settings.STATE_DIR / COUNTS_FILE)
        listeners = [counting.add, *([log_requests] if settings.LOG_REQUESTS else [])]
        tracer = make_tracer()
        if tracer is not None:
            listeners.append(tracer.add)
        stream = open_stream()
        keep = None if stream is None else stream.write
        run(Loader(settings.SPOOL_DIR, listeners, keep), stop, counting, stream)
        for ending in (stream, tracer):
            if ending is not None:
                ending.stop()


def make_tracer() -> Tracer | None:
    """None: nobody takes spans, and their library is not loaded."""
    if not settings.TRACING:
        return None
    from scheduler.tracing import Tracer

    return Tracer()


class Counting:
    """What the records add up to, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = load_counts(path)
        self._changed = False

    def add(self, records: list[Record]) -> None:
        self._counts.add(records)
        self._changed = self._changed or bool(records)

    def save(self) -> None:
        """After each look into the spool."""
        if self._changed:
            self._changed = False
            try:
                save_counts(self._path, self._counts)
            except OSError as error:
                self._changed = True
                logger.warning("Cannot write what was counted: %s", error)


class Teller:
    """Tells health checks and metrics how far the recorder is, at most once a second."""

    def __init__(self, loader: Loader, stream: Stream | None) -> None:
        self._loader = loader
        self._stream = stream
        self._caught_up_at = time.time()
        self._told_at = float("-inf")
        self._offsets: dict[str, int] = {}

    def caught_up(self) -> None:
        """Everything that was in the spool is loaded."""
        self._caught_up_at = time.time()
        self._offsets = self._loader.offsets()

    def beat(self) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            pulse.write_recorder(
                pulse.RecorderPulse(
                    at=time.time(),
                    caught_up_at=self._caught_up_at,
                    offsets=self._offsets,
                    stream_waiting_bytes=0 if self._stream is None else self._stream.waiting_bytes,
                    stream_lost=0 if self._stream is None else self._stream.lost,
                )
            )


def use_a_plain_connection() -> None:
    """This process has one thread. A pool would only add the growing pauses between its attempts
    to reconnect, and records must appear soon after the database is back."""
    database = connection.settings_dict["OPTIONS"]
    if database.pop("pool", None):
        database.setdefault("connect_timeout", 5)


def run(
    loader: Loader, stop: threading.Event, counting: Counting, stream: Stream | None = None
) -> None:
    """Load, pause, repeat until ``stop`` is set; what came until then is loaded before the end.

    While the database cannot be had, tries again after 0.2 s, doubling to 2 s.
    """
    pause = 0.0
    failures = 0
    captures = settings.SPOOL_DIR / CAPTURES
    tell = Teller(loader, stream)
    busy_at = time.monotonic()
    while not stop.wait(pause):
        try:
            if loader.load() + load_captures(captures):
                busy_at = time.monotonic()
            pause, failures = PAUSE_SECONDS, 0
            tell.caught_up()
        except (DatabaseError, OSError) as error:
            pause = min(LONGEST_BACK_OFF_SECONDS, 0.2 * 2**failures)
            failures += 1
            logger.warning("Records wait in the spool, next attempt in %.1f s: %s", pause, error)
            connection.close()
        tell.beat()
        counting.save()
        if time.monotonic() - busy_at > IDLE_SECONDS:
            connection.close()
    try:
        loader.load()
        load_captures(captures)
    except (DatabaseError, OSError) as error:
        logger.warning("Records stay in the spool: %s", error)
    counting.save()
    connection.close()
