"""What gateways and the scheduler tell each other, in MessagePack.

A stream's entry is one ``Batch`` of messages, in order. Jobs are known by the number that their
gateway gave them. Times travel as ages in seconds, since every process has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import msgspec

from accounts.limits import Holder, Use
from scheduler.core.decisions import Decision, WaitReason
from scheduler.core.jobs import Job, Usage
from scheduler.core.picture import FlowPicture
from scheduler.core.views import BackendView, QueuedView
from scheduler.serving import Limited, LiveView

T = TypeVar("T")

#: Raised when an older process would misread a newer one's messages; it ignores them then.
VERSION = 1


class _Message(msgspec.Struct, array_like=True, gc=False):
    """An array: a number for its kind, then the fields."""


# ---- from a gateway


class Submit(_Message, tag=1):
    number: int
    job: Job


class Cancel(_Message, tag=2):
    """Its client has left, or the slot is given back without charge (R6)."""

    number: int


class Settle(_Message, tag=3):
    """``serial`` counts a gateway's settlements, so that none counts twice."""

    number: int
    serial: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: bool

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            estimated=self.estimated,
        )


class Retry(_Message, tag=4):
    number: int
    exclude: list[int]


class Progress(_Message, tag=5):
    number: int
    prompt_tokens: int
    completion_tokens: int


class FirstByte(_Message, tag=6):
    number: int
    seconds: float  # since its dispatch


class Mark(_Message, tag=7):
    """How a backend behaved (P5)."""

    backend_id: int
    verdict: str  # "ok", "busy", "failed"
    seconds: float = 0.0  # of being busy


class Ask(_Message, tag=8):
    """A question, to be answered by ``Told`` with the same number."""

    question: int
    what: str  # "view", "waiting", "picture", "evict", "position", "limits"
    argument: Any = None


class Waits(_Message):
    """A job that its gateway holds."""

    number: int
    job: Job
    age: float
    attempts: int
    avoid: list[int]


class Runs(_Message):
    number: int
    job: Job
    age: float
    attempts: int
    backend_id: int
    running_for: float


class Ended(_Message):
    """A settlement that may not have been saved yet."""

    run: Runs
    settle: Settle


class Register(_Message, tag=9):
    """All that a gateway has. Begins a session, in which batches are counted from 1."""

    waits: list[Waits]
    runs: list[Runs]
    ended: list[Ended]


class Bye(_Message, tag=10):
    """The gateway ends; nothing is left of it."""


# ---- to a gateway


class Leased(_Message, tag=21):
    number: int
    attempt: int
    backend_id: int
    backend_name: str
    model_name: str
    token_rate: float
    hold: float
    decision: Decision  # without the backends' names, which every process knows
    position_at_arrival: int
    wait_reason: WaitReason
    limited: Limited | None = None


class Queued(_Message, tag=22):
    number: int
    position_at_arrival: int
    wait_reason: WaitReason
    limited: Limited | None = None


class Refused(_Message, tag=23):
    """Never queued, or dropped from the queue; ``after_queueing`` says which."""

    number: int
    after_queueing: bool
    reason: str
    message: str
    retry_after: int | None
    hopeless: bool = False


class Told(_Message, tag=24):
    question: int
    answer: bytes  # MessagePack; empty: it cannot be answered


class Again(_Message, tag=25):
    """Something has been lost on the way: register again."""


# ---- to all


class Beat(_Message, tag=41):
    """The scheduler is alive. ``saved``: {gateway: serial of its last settlement that is safe}."""

    epoch: int
    gathering: bool  # it has just taken over, and waits for all gateways to register
    backends: list[BackendView]
    saved: dict[str, int]


ToScheduler = Submit | Cancel | Settle | Retry | Progress | FirstByte | Mark | Ask | Register | Bye
ToGateway = Leased | Queued | Refused | Told | Again


class Inward(msgspec.Struct, array_like=True):
    """A gateway's batch. Sessions and batches are counted, so that a lost one is noticed."""

    version: int
    gateway: str
    epoch: int
    session: int
    number: int
    messages: list[ToScheduler]


class Outward(msgspec.Struct, array_like=True):
    version: int
    epoch: int
    session: int
    number: int
    messages: list[ToGateway]


class Broadcast(msgspec.Struct, array_like=True):
    version: int
    beat: Beat


def _unit(kind: Any, value: Any) -> Any:
    """A fairness unit, which may be a pair: the one type here that msgspec does not know itself.

    Raises: TypeError, of any other, which would be a message's field that nobody can read.
    """
    if kind is not Hashable:
        raise TypeError(f"Messages have no fields of the type {kind}.")
    return tuple(value) if isinstance(value, list) else value


encode = msgspec.msgpack.Encoder().encode
decode_inward = msgspec.msgpack.Decoder(Inward, dec_hook=_unit).decode
decode_outward = msgspec.msgpack.Decoder(Outward).decode
decode_broadcast = msgspec.msgpack.Decoder(Broadcast).decode
decode_view = msgspec.msgpack.Decoder(LiveView, dec_hook=_unit).decode
#: With the moment on the scheduler's clock, to which the times in it belong.
decode_waiting = msgspec.msgpack.Decoder(tuple[float, list[QueuedView]], dec_hook=_unit).decode
decode_picture = msgspec.msgpack.Decoder(tuple[float, list[FlowPicture]], dec_hook=_unit).decode
decode_evicted = msgspec.msgpack.Decoder(bool).decode
decode_uses = msgspec.msgpack.Decoder(list[Use]).decode
decode_holders = msgspec.msgpack.Decoder(list[Holder]).decode
decode_position = msgspec.msgpack.Decoder(tuple[int, float | None]).decode


def read(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """The batch, or None where it is of another version or broken."""
    try:
        batch: Any = decode(data)
    except msgspec.MsgspecError:
        return None
    return batch if batch.version == VERSION else None
