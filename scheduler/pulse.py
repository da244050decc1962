"""What the processes on one data folder tell of themselves, for health checks and metrics.

Each writes a small file every ``PULSE_SECONDS``, whatever it serves, and whichever of them is asked
reads them all: behind one port there may be several gateways, and a scrape reaches any one of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from django.conf import settings

PULSE_SECONDS = 2.0
#: A process that has written nothing for so long is gone, or does nothing.
GONE_SECONDS = 15.0
_FORGOTTEN_SECONDS = 3600.0
_RECORDER = "recorder.json"

T = TypeVar("T")


class Pulse(msgspec.Struct, kw_only=True):
    """A gateway or a scheduler. Times are epoch seconds."""

    kind: str  # "gateway", "scheduler"
    pid: int
    at: float
    started_at: float
    loop_lag: float  # seconds; how late its event loop was at worst since the pulse before
    serving: int  # requests under way
    unwritten: int  # records that it could not write so far
    lines_lost: int
    write_errors: int
    database_away: bool
    in_touch: bool  # with the scheduler


class RecorderPulse(msgspec.Struct, kw_only=True):
    """The recorder: when it last had everything, and how far it has loaded which spool file."""

    at: float
    caught_up_at: float
    offsets: dict[str, int]
    stream_waiting_bytes: int = 0  # of the decision stream
    stream_lost: int = 0


_decoder = msgspec.json.Decoder(Pulse)
_recorder_decoder = msgspec.json.Decoder(RecorderPulse)


def write(pulse: Pulse) -> None:
    """Blocks for the disk, which may be full: then the last one stays."""
    _replace(_folder() / f"{pulse.kind}-{pulse.pid}.json", msgspec.json.encode(pulse))


def remove(kind: str) -> None:
    """This process ends."""
    with contextlib.suppress(OSError):
        (_folder() / f"{kind}-{os.getpid()}.json").unlink(missing_ok=True)


def pulses() -> list[Pulse]:
    """Of the processes that live, by kind and process id."""
    found = []
    now = time.time()
    for path in sorted(_folder().glob("*-*.json")):
        pulse = _read(path, _decoder)
        if pulse is not None and now - pulse.at < GONE_SECONDS:
            found.append(pulse)
        elif pulse is not None and now - pulse.at > _FORGOTTEN_SECONDS:
            path.unlink(missing_ok=True)
    return found


def has_been_here(kind: str) -> bool:
    """Whether a process of that kind runs on this data folder or has ended there without a word."""
    return any(_folder().glob(f"{kind}-*.json"))


def write_recorder(pulse: RecorderPulse) -> None:
    _replace(_folder() / _RECORDER, msgspec.json.encode(pulse))


def recorder_pulse() -> RecorderPulse | None:
    """None: no recorder has run on this data folder."""
    return _read(_folder() / _RECORDER, _recorder_decoder)


def spool_backlog(recorder: RecorderPulse | None) -> int:
    """Bytes in the spool that the recorder has not loaded, start markers included."""
    offsets = {} if recorder is None else recorder.offsets
    waiting = 0
    for path in [*settings.SPOOL_DIR.glob("*.open"), *settings.SPOOL_DIR.glob("*.jsonl")]:
        with contextlib.suppress(FileNotFoundError):  # loaded or renamed meanwhile
            waiting += max(0, path.stat().st_size - offsets.get(path.stem, 0))
    return waiting


def replace_file(path: Path, data: bytes) -> None:
    """Whoever reads it sees the old content or the new one, whole. Raises: OSError."""
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_bytes(data)
    new.replace(path)


def _replace(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, data)


def _folder() -> Path:
    folder: Path = settings.STATE_DIR
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        return decoder.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None  # none there, or of another version
