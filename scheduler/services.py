"""What the pages and the management API share: live figures, joined with the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from accounts.limits import Holder, Use, iso
from accounts.models import User
from audit.models import Deed
from backends.models import Backend
from scheduler import serving
from scheduler.budgets import site_zone
from scheduler.causes import Facts, cause
from scheduler.explain import Case
from scheduler.models import Decision
from scheduler.serving import LiveView, QueuePicture


def live() -> LiveView | None:
    """The running scheduler's view of itself, at most 1 s old; None where none runs."""
    running = serving.current()
    return None if running is None else running.view()


def queue_picture() -> QueuePicture | None:
    """Everything that waits now; None where no scheduler runs."""
    running = serving.current()
    return None if running is None else running.queue_picture()


def evict(request_id: str) -> bool:
    """Drop a waiting request, and note who did. False: no such request waits here.

    Raises: TimeoutError.
    """
    running = serving.current()
    if running is None or not running.evict(request_id):
        return False
    Deed.note(f"request {request_id}", "removed")
    return True


def limits_of(user: User, key_ids: Iterable[int] = ()) -> list[dict[str, Any]]:
    """How every limit stands that concerns a user, the group as a whole included, and those keys.

    As ``described``; empty where nothing is limited or no scheduler runs.
    """
    holders = [Holder("user", user.pk), *(Holder("key", pk) for pk in key_ids)]
    if user.group_id is not None:
        holders.append(Holder("group", user.group_id))
    return use_of(holders)


def use_of(holders: Iterable[Holder]) -> list[dict[str, Any]]:
    """How the limits of these stand, as ``described``. Raises: TimeoutError."""
    running = serving.current()
    if running is None:
        return []
    return [one for use in running.limits_of(list(holders)) for one in described(use)]


def described(use: Use) -> list[dict[str, Any]]:
    """Each limit of a holder: {"holder", "id", "limit", "period", "value", "used", "reserved",
    "remaining", "resets_at", "shadow"}. ``used`` does not include what is reserved."""
    limits = use.limits
    found = (
        ("requests_per_minute", limits.requests_per_minute, use.requests_in_minute, 0.0),
        ("tokens_per_minute", limits.tokens_per_minute, use.tokens_in_minute, 0.0),
        ("max_concurrent", limits.max_concurrent, use.running, 0.0),
        ("max_queued", limits.max_queued, use.waiting, 0.0),
        ("token_budget", limits.token_budget, use.budget_used, use.budget_reserved or 0.0),
    )
    return [
        {
            "holder": use.holder.kind,
            "id": use.holder.ident,
            "limit": name,
            "period": limits.budget_period if name == "token_budget" else None,
            "value": value,
            "used": used or 0.0,
            "reserved": reserved,
            "remaining": max(0.0, value - (used or 0.0) - reserved),
            "resets_at": iso(use.budget_resets_at, site_zone())
            if name == "token_budget" and use.budget_resets_at is not None
            else None,
            "shadow": name in limits.shadow,
        }
        for name, value, used, reserved in found
        if value is not None
    ]


def case_of(decision: Decision, names: Mapping[str, str] | None = None) -> Case:
    """A stored decision as the pure explanations take it. At most one query, for the names of
    backends, {number: name}, where they are not given."""
    values = {one.name: getattr(decision, one.name) for one in fields(Case) if one.name != "cause"}
    for name, value in values.items():
        if name.endswith("_at") and value is not None:
            values[name] = value.timestamp()
    values["backend_names"] = _backend_names(decision, names)
    return Case(**values, cause=cause_of(decision))


def cause_of(decision: Decision) -> str:
    """Why a stored decision was slow: one of ``CAUSES``; empty where it was not."""
    values = {
        one.name: getattr(decision, one.name)
        for one in fields(Facts)
        if one.name not in ("loaded_points", "attempts")
    }
    for name, value in values.items():
        if name.endswith("_at") and value is not None:
            values[name] = value.timestamp()
    chosen = decision.score_parts.get(str(decision.selected_backend_id), {})
    attempts = [(_moment(one.get("started_at")), _moment(one.get("ended_at")))
                for one in decision.attempts]  # fmt: skip
    return cause(Facts(**values, loaded_points=chosen.get("model_loaded"), attempts=attempts))


def _moment(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _backend_names(decision: Decision, known: Mapping[str, str] | None) -> dict[str, str]:
    """{backend id: name}: as recorded, else as they are called today."""
    names = {str(key): name for key, name in decision.backend_names.items()}
    if decision.selected_backend_id is not None:
        names.setdefault(str(decision.selected_backend_id), decision.selected_backend)
    mentioned = {*map(str, decision.candidate_backends), *decision.constraints}
    if known is not None:
        return {**known, **names}
    if missing := mentioned - set(names):
        found = Backend.objects.filter(pk__in=missing).values_list("pk", "name")
        names.update((str(pk), name) for pk, name in found)
    return names
