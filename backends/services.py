"""Polling of backends and nodes, for the worker, the admin and ``manage.py apply``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async
from django.utils import timezone

from backends.claims import claim, claim_due, claim_due_nodes, release, with_status
from backends.engines.gpu import Gpu, parse_gpus
from backends.engines.replies import Question
from backends.fetch import UnansweredError, ask, new_client
from backends.keeping import save_node, save_observation
from backends.models import Backend, BackendStatus, Node
from backends.probe import TOTAL_SECONDS, ProbeResult, Target, details, probe

__all__ = [
    "claim_due",
    "detect",
    "detect_engines",
    "poll",
    "poll_due",
    "probe_backends",
    "run",
    "save_observation",
    "target_of",
]

logger = logging.getLogger(__name__)

#: Polls at once in one process; each holds up to four sockets.
_MAX_AT_ONCE = 100
_PROBE_SECONDS = 2.5


def poll_due() -> int:
    """Poll every backend and node that is due; returns how many that were."""
    now = timezone.now()
    backends, nodes = claim_due(now), claim_due_nodes(now)
    if backends or nodes:
        run(_poll_all, backends, nodes)
    return len(backends) + len(nodes)


def probe_backends(
    ids: Iterable[int], *, seconds: float = _PROBE_SECONDS, anew: bool = False
) -> None:
    """Poll these backends now, in at most about ``seconds`` + 0.5. What happens to each is in its
    status row afterwards; a backend that cannot be reached raises nothing.

    ``anew``: as if nothing were known of them yet, neither engine nor details.
    """
    deadline = time.monotonic() + seconds
    backends = with_status(Backend.objects.filter(pk__in=list(ids)))
    mine = [backend for backend in backends if claim(backend, timezone.now())]
    if anew:
        _forget(mine)
    if mine:
        run(poll, mine, seconds)
    # The rest is being polled by the worker at this moment: its outcome will do as well.
    others = {backend.pk for backend in backends} - {backend.pk for backend in mine}
    while others and time.monotonic() < deadline and _any_claimed(others):
        time.sleep(0.05)


def _forget(backends: Iterable[Backend]) -> None:
    """What was learned of these claimed backends is not made use of; its row stays as it is."""
    for backend in backends:
        backend.status.detected_engine = ""
        details.forget(target_of(backend).root)


def _any_claimed(ids: Iterable[int]) -> bool:
    claimed = BackendStatus.objects.filter(backend__in=ids, claimed_until__gt=timezone.now())
    return claimed.exists()


def detect(base_url: str, api_key: str | None = None, *, seconds: float = 3.0) -> ProbeResult:
    """Ask a server that need not be in the database what it is. Raises nothing."""
    target = Target(base_url=base_url, api_key=api_key, total_seconds=seconds)
    result: ProbeResult = run(probe, target)
    return result


def detect_engines(backends: Sequence[Backend]) -> dict[int, ProbeResult]:
    """{backend id: what its server is found to be}, whatever engine was chosen for it."""
    targets = [
        replace(target_of(backend, _PROBE_SECONDS), engine="auto", known_engine="")
        for backend in backends
    ]
    results = run(_probe_all, targets) if targets else []
    return {backend.pk: result for backend, result in zip(backends, results, strict=True)}


async def _probe_all(targets: Sequence[Target]) -> list[ProbeResult]:
    return list(await asyncio.gather(*(probe(target) for target in targets)))


def run(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """Run network work from a thread of Django's, and wait for it."""
    # A loop of its own: under ASGI the calling thread's parent loop is the gateway's, which must
    # not parse metrics pages. The database work inside comes back to the calling thread.
    return AsyncToSync(work, force_new_loop=True)(*arguments)


async def _poll_all(backends: Sequence[Backend], nodes: Sequence[Node]) -> None:
    await asyncio.gather(poll(backends), poll_nodes(nodes))


async def poll(backends: Sequence[Backend], seconds: float = TOTAL_SECONDS) -> None:
    """Poll claimed backends at once, keeping each answer as it arrives: one that hangs delays no
    other. Gives the claims back."""
    room = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(backend: Backend) -> None:
        async with room:
            await _poll_backend(backend, seconds)

    await _all(one(backend) for backend in backends)


async def _poll_backend(backend: Backend, seconds: float) -> None:
    result = await probe(target_of(backend, seconds))
    await sync_to_async(_keep)(backend, result)


def _keep(backend: Backend, result: ProbeResult) -> None:
    try:
        save_observation(backend, result)
    finally:
        release(backend)


def target_of(backend: Backend, seconds: float = TOTAL_SECONDS) -> Target:
    """What it takes to ask ``backend`` something."""
    status = getattr(backend, "status", None) or BackendStatus()
    return Target(
        base_url=backend.base_url,
        engine=backend.engine,
        # After a failure it may be another server: then all is asked anew.
        known_engine=status.detected_engine if status.reachable else "",
        api_key=backend.api_key,
        connect_timeout=backend.connect_timeout,
        total_seconds=seconds,
    )


async def poll_nodes(nodes: Sequence[Node]) -> None:
    """Ask claimed nodes for their GPUs, keeping each answer as it arrives."""
    await _all(_poll_node(node) for node in nodes)


async def _poll_node(node: Node) -> None:
    started_at = timezone.now()
    gpus: tuple[Gpu, ...] | None = None
    try:
        async with asyncio.timeout(TOTAL_SECONDS):
            gpus, error = await _ask_node(node)
    except (UnansweredError, TimeoutError) as problem:
        error = str(problem) or f"no answer within {TOTAL_SECONDS:g} s"
    await sync_to_async(save_node)(node, started_at, gpus, error)


async def _ask_node(node: Node) -> tuple[tuple[Gpu, ...] | None, str]:
    key = node.telemetry_key
    headers = {"x-sidecar-key": key, "authorization": f"Bearer {key}"} if key else None
    async with new_client(connect_timeout=TOTAL_SECONDS, headers=headers) as client:
        reply = await ask(client, node.telemetry_url, Question(""))
    gpus = parse_gpus(reply)
    if gpus is None:
        return None, f"status {reply.status}, and no GPUs in the answer"
    return gpus, ""


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end; one that fails, for want of the database, costs the others nothing."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("A poll's outcome was lost: %s", outcome, exc_info=outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
