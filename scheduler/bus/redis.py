"""Where things are in Redis, and the connections to it.

======================  ========================================================================
``mindrouter:leader``   who leads, ``<epoch>:<name>``; expires unless renewed
``mindrouter:epoch``    the last epoch; only ever grows
``mindrouter:in``       stream: batches of all gateways to the scheduler
``mindrouter:out:G``    stream: batches of the scheduler to the gateway G
``mindrouter:all``      stream: the scheduler's beats, which every gateway reads
``mindrouter:gateways`` set of gateways; ``mindrouter:gateway:G`` expires when G stops beating
``mindrouter:shares``   the last checkpoint
======================  ========================================================================
"""

from __future__ import annotations

import contextlib

import hiredis
import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from scheduler.bus.wire import SILENT_SECONDS, Command, Line

LEADER = "mindrouter:leader"
EPOCH = "mindrouter:epoch"
IN = "mindrouter:in"
OUT = "mindrouter:out:"
ALL = "mindrouter:all"
GATEWAYS = "mindrouter:gateways"
GATEWAY = "mindrouter:gateway:"
SHARES = "mindrouter:shares"

#: What a broken, frozen or confused Redis raises.
ERRORS = (redis.exceptions.RedisError, hiredis.HiredisError, OSError, TimeoutError)

BEAT_SECONDS = 0.5
BLOCK_MS = 500
PAUSE_SECONDS = 0.1  # after an error
COUNT = 2000  # entries of one read
#: Batches kept; whoever falls further behind registers again.
IN_ENTRIES = 20_000
OUT_ENTRIES = 5_000
ALL_ENTRIES = 100
#: A gateway that has not beaten for so long is dead.
GATEWAY_SECONDS = 4.0
OUT_EXPIRES_SECONDS = 60

Entries = list[tuple[bytes, bytes]]  # id, batch


def connect(url: str) -> Redis:
    """For what is rare. No command is repeated: after errors both sides compare what they have."""
    return Redis.from_url(
        url,
        socket_timeout=SILENT_SECONDS,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


async def read(line: Line, positions: dict[str, bytes]) -> dict[str, Entries]:
    """Wait for entries after the positions, and move these. Raises: one of ``ERRORS``."""
    options = ("COUNT", COUNT, "BLOCK", BLOCK_MS, "STREAMS")
    reply = await line.execute(("XREAD", *options, *positions, *positions.values()))
    found: dict[str, Entries] = {}
    for name, entries in reply or ():
        key = name.decode()
        found[key] = [(position, fields[1]) for position, fields in entries]
        positions[key] = entries[-1][0]
    return found


async def last_entry(line: Line, stream: str) -> tuple[bytes, bytes]:
    """The newest entry of a stream; ``(b"0-0", b"")`` where there is none."""
    entries = await line.execute(("XREVRANGE", stream, "+", "-", "COUNT", 1))
    return (entries[0][0], entries[0][1][1]) if entries else (b"0-0", b"")


async def close(client: Redis) -> None:
    with contextlib.suppress(*ERRORS):
        await client.aclose()


def adding(stream: str, data: bytes, limit: int) -> Command:
    """The command that adds a batch to a stream of about ``limit`` entries."""
    return "XADD", stream, "MAXLEN", "~", limit, "*", b"b", data
