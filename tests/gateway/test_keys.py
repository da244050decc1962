"""Changes of keys, users, groups and weights: in force without a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from accounts.models import ApiKey, Group, Quota, User
from mindrouter.gateway import consumer
from scheduler import serving
from tests.running import RunningRouter, body, until
from tests.stubs.openai_stub import OpenAIStub, drip, held

pytestmark = pytest.mark.usefixtures("backend")
LIMIT = 5.0  # seconds, as promised


async def until_status(router: RunningRouter, status: int) -> float:
    """Seconds until a request gets this status."""
    began = time.monotonic()
    while (await router.chat()).status_code != status:
        assert time.monotonic() - began < LIMIT
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def rotate() -> None:
    key = ApiKey.objects.get()
    key.set_key(ApiKey.generate())
    key.save()


REVOCATIONS: dict[str, Callable[[], Any]] = {
    "key disabled": lambda: ApiKey.objects.update(enabled=False),
    "key deleted": lambda: ApiKey.objects.all().delete(),
    "key expired": lambda: ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1)),
    "key rotated": rotate,
    "user disabled": lambda: User.objects.update(is_active=False),
    "user deleted": lambda: User.objects.all().delete(),
}


@pytest.mark.parametrize("revoke", REVOCATIONS.values(), ids=REVOCATIONS.keys())
async def test_a_revoked_key_is_refused_within_seconds(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, revoke: Callable[[], Any]
) -> None:
    assert (await router.chat()).status_code == 200
    await router.ask(revoke)
    assert await until_status(router, 401) < LIMIT


async def test_a_key_that_is_enabled_again_works_within_seconds(router: RunningRouter) -> None:
    await router.change(lambda: ApiKey.objects.update(enabled=False))
    assert (await router.chat()).status_code == 401
    await router.ask(lambda: ApiKey.objects.update(enabled=True))
    assert await until_status(router, 200) < LIMIT


async def test_a_key_expires_at_its_moment(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = timezone.now() + timedelta(hours=1)
    await router.change(lambda: ApiKey.objects.update(expires_at=moment))
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(consumer, "time", clock)
    clock.time = lambda: moment.timestamp() - 0.001
    assert (await router.chat()).status_code == 200
    clock.time = lambda: moment.timestamp() + 0.001
    assert (await router.chat()).status_code == 401


async def test_a_running_stream_ends_as_it_began_when_its_key_is_revoked(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(drip(0.01, 20))
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        parts = response.aiter_text()
        text = await anext(parts)
        await router.change(lambda: ApiKey.objects.all().delete())
        text += "".join([part async for part in parts])
    assert text.endswith("data: [DONE]\n\n")
    assert (await router.record()).outcome == "completed"


async def test_a_lower_limit_is_in_force_within_seconds(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.ask(lambda: Group.objects.update(max_concurrent=0))
    assert await until_status(router, 429) < LIMIT


async def test_a_new_group_is_recorded(router: RunningRouter) -> None:
    await router.chat()

    def move() -> None:
        User.objects.update(group=Group.objects.create(name="new", scheduler_weight=3))

    await router.change(move)
    await router.chat()
    before, after = await router.records()
    assert (before.group, before.user_weight) == ("ada", 1)
    assert (after.group, after.user_weight) == ("new", 3)


async def test_unknown_keys_are_neither_passed_nor_refused_while_the_database_is_away(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import OperationalError

    def broken(*_: Any) -> Any:
        raise OperationalError("no database")

    monkeypatch.setattr(serving, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(serving, "_load_changes", broken)
    await until(lambda: router.runtime.database_away, LIMIT)
    assert (await router.chat()).status_code == 200
    response = await router.chat(key="mr-unknown")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_backend_available"
    assert response.headers["retry-after"] == "5"
    monkeypatch.undo()
    await until(lambda: not router.runtime.database_away, LIMIT)
    assert (await router.chat(key="mr-unknown")).status_code == 401


# ---- B59: odd weights

WEIGHTS = [Decimal(0), Decimal("0.5"), Decimal(1_000_000_000), Decimal("0.000001"), None]


@pytest.mark.parametrize("weight", WEIGHTS)
async def test_any_weight_that_may_be_set_serves(
    router: RunningRouter, stub: OpenAIStub, weight: Decimal | None
) -> None:
    await router.change(lambda: Group.objects.update(scheduler_weight=weight))
    for override in ("none", *WEIGHTS):
        await router.change(override_weight, override)
        answers = await asyncio.gather(*(router.chat(stream=bool(n % 2)) for n in range(6)))
        assert {a.status_code for a in answers} == {200}
        in_force = weight if override in ("none", None) else override
        expected = 1.0 if in_force is None else float(in_force)
        assert {r.user_weight for r in (await router.records())[-6:]} == {expected}


def override_weight(override: Any) -> None:
    if override != "none":
        defaults = {"weight_override": override}
        Quota.objects.update_or_create(user=User.objects.get(), defaults=defaults)


async def test_a_weight_that_may_not_be_set_changes_nothing(router: RunningRouter) -> None:
    def attempt(weight: str) -> None:
        with pytest.raises((IntegrityError, ValidationError)), transaction.atomic():
            Group.objects.filter(name="ada").update(scheduler_weight=Decimal(weight))

    for weight in ("-1", "NaN", "1000000001", "-0.000001"):
        await router.change(attempt, weight)
    assert (await router.chat()).status_code == 200
    assert (await router.record()).user_weight == 1


async def test_weight_zero_is_served_only_when_nobody_else_can_take_the_slot(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, models=("one",), max_concurrent=1)
    background = await router.user("background", weight=0)
    go_on = asyncio.Event()
    stub.then(held(go_on))
    first = asyncio.create_task(router.chat(model="one"))
    await stub.until_calls(1)
    order = [asyncio.create_task(router.chat(model="one", key=background, user="0"))]
    await router.until_waiting(1)
    order += [asyncio.create_task(router.chat(model="one", user=str(n))) for n in (1, 2)]
    await router.until_waiting(3)
    go_on.set()
    await asyncio.gather(first, *order)
    assert [call.body["user"] for call in stub.calls[1:]] == ["1", "2", "0"]
