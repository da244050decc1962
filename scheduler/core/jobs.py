"""The values that travel through the scheduler: what is asked, who asks, where it may go.

A request becomes a *job*; a queued job is held by a *ticket*; a job that got a slot has a *lease*;
its settled tokens are its *usage*. All times are monotonic seconds, all sizes tokens, all memory
MiB. Everything here is immutable except ``Ticket`` and ``Lease``, which only the scheduler changes.

What is made anew for every request is a msgspec ``Struct``: as immutable as a frozen dataclass,
made in a quarter of the time. What comes with the configuration is a dataclass.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

#: The fairness unit (R15): a user id; behind a trusted key (user id, end user), and
#: (user id, end user or "", BACKGROUND) for background calls.
Unit = Hashable
BACKGROUND = "background"

Strategy = Literal["score", "affinity", "round_robin"]

#: yes, no, or unknown: what a backend is known to be able to do.
Capability = bool | None

#: What a model may be for besides making text: each is a capability of its own.
Task = Literal["rerank", "transcription", "speech", "images", "moderation"]
TASKS: tuple[Task, ...] = get_args(Task)
#: The capabilities that ``ModelSpec`` tells of, by their names there.
CAPABILITIES = ("vision", "tools", "json", "embeddings", *TASKS)


class Needs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request needs of a model, as read from its body (P1)."""

    vision: bool = False
    tools: bool = False
    json: bool = False
    embeddings: bool = False
    task: Task | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request, as the scheduler sees it. ``prompt_tokens`` is an estimate."""

    request_id: str
    user_id: int
    unit: Unit
    model_name: str  # after aliases: the name looked up in ``BackendSpec.models``
    needs: Needs = Needs()
    prompt_tokens: int = 0
    max_tokens: int | None = None  # the client's own limit on the answer
    cache_key: str | None = None
    #: What must fit a model's context at once, where that is not prompt and answer together: of
    #: many inputs the longest.
    context_tokens: int | None = None
    key_id: int = 0  # the API key that it came with; 0: none
    max_wait_seconds: float | None = None  # if less than its user's


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSpec:
    """A user's standing, from the database (R13, R14, R16). None = no limit of its own."""

    user_id: int
    username: str
    group_id: int | None
    group_name: str | None
    weight: float  # R13's outcome: override, else group, else environment fallback
    group_weight: float  # the group's own weight, for share mode "group" (R14)
    max_concurrent: int | None = None  # waiting + running
    max_queued: int | None = None  # of this user
    group_max_queued: int | None = None  # of the whole group
    max_wait_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as one backend offers it. ``name`` is what that backend calls it."""

    name: str
    vision: Capability = None
    tools: Capability = None
    json: Capability = None
    embeddings: Capability = None
    rerank: Capability = None
    transcription: Capability = None
    speech: Capability = None
    images: Capability = None
    moderation: Capability = None
    context_length: int | None = None
    vram_mib: float | None = None  # needed when it is not loaded yet


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend's configuration. ``models`` is keyed by every name a client may use for it."""

    backend_id: int
    name: str
    address: str  # what rendezvous hashing mixes with the cache key
    max_concurrent: int
    max_queue: int
    priority: float = 0.0
    enabled: bool = True
    draining: bool = False
    paused: bool = False
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    allowed_group_ids: frozenset[int] | None = None  # None = every group

    @property
    def in_service(self) -> bool:
        """Whether it may be sent requests, as far as the configuration goes."""
        return self.enabled and not self.draining and not self.paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a poll learned. None = unknown, never 0. Advice with an age, not truth (P1)."""

    observed_at: float
    reachable: bool | None = None  # False only when the connection was refused or it is loading
    running: int | None = None
    waiting: int | None = None
    loaded_models: frozenset[str] | None = None  # as the backend names them
    vram_free_mib: float | None = None
    vram_total_mib: float | None = None
    utilization: float | None = None  # 0..1: GPU or KV-cache use


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of a finished attempt. ``estimated`` = the backend did not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    estimated: bool = False


def end_user_of(unit: Unit) -> str | None:
    """Who is behind a trusted key, if it has named anybody (R15)."""
    return (unit[1] or None) if isinstance(unit, tuple) else None


def is_background_call(unit: Unit) -> bool:
    """Whether the unit is of calls that nobody waits for (R15)."""
    return isinstance(unit, tuple) and unit[2:] == (BACKGROUND,)
