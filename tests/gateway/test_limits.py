"""Limits over HTTP: what passes, what is refused and how, in every dialect."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from accounts.limits import Hold, Holder
from accounts.models import ApiKey, Group, ModelLimits, Quota, User, hash_key
from scheduler.models import ModelPrice
from tests.factories import make_api_key
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import OpenAIStub, held, refuse

pytestmark = pytest.mark.usefixtures("backend")
MANY = 300


async def limit(router: RunningRouter, **limits: Any) -> None:
    """Set ada's own limits."""
    user = await router.ask(User.objects.get, username="ada")
    await router.change(Quota.objects.update_or_create, user=user, defaults=limits)


def error_of(response: Any) -> Any:
    return response.json()["error"]


@pytest.mark.parametrize("holder", ["user", "group default", "group total", "key", "model"])
async def test_of_hundreds_at_once_exactly_the_allowed_number_passes(
    router: RunningRouter, stub: OpenAIStub, holder: str
) -> None:
    match holder:
        case "user":
            await limit(router, requests_per_minute=40)
        case "group default":
            await router.change(Group.objects.filter(name="ada").update, requests_per_minute=40)
        case "group total":
            rows = Group.objects.filter(name="ada")
            await router.change(rows.update, total_requests_per_minute=40)
        case "key":
            await router.change(ApiKey.objects.update, requests_per_minute=40)
        case _:
            await router.change(ModelLimits.objects.create, model_name="m", requests_per_minute=40)

    answers = await asyncio.gather(*(router.chat() for _ in range(MANY)))

    passed = [one for one in answers if one.status_code == 200]
    refused = [one for one in answers if one.status_code == 429]
    assert (len(passed), len(refused), len(stub.calls)) == (40, 260, 40)
    assert error_of(refused[0])["code"] == "rate_limit_exceeded"
    told = error_of(refused[0])["message"]
    assert "requests_per_minute is 40, of which 40 is used" in told
    records = await router.records()
    assert sum(one.outcome == "completed" for one in records) == 40
    assert sum(one.charged_tokens for one in records) == 40 * 10


async def test_a_budget_lets_through_what_its_estimates_fit_and_ends_at_what_was_charged(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    # "Hello" is 2 estimated tokens and 4 for its message: 6 + 494 = 500 for each.
    await limit(router, token_budget=1000, budget_period="day")
    release = asyncio.Event()
    stub.behaviour = held(release)
    tasks = [asyncio.create_task(router.chat(max_tokens=494)) for _ in range(20)]
    await stub.until_calls(2)
    while sum(task.done() for task in tasks) < 18:
        await asyncio.wait([t for t in tasks if not t.done()], return_when="FIRST_COMPLETED")

    during = (await router.client.get("/v1/usage/me")).json()
    assert (during["used"], during["reserved"], during["remaining"]) == (0, 1000, 0)
    refused = [task.result() for task in tasks if task.done()]
    assert {error_of(one)["code"] for one in refused} == {"quota_exceeded"}
    assert {one.status_code for one in refused} == {429}
    assert "token_budget is 1000 per day, of which 1000" in error_of(refused[0])["message"]
    release.set()
    await asyncio.gather(*tasks)

    after = (await router.client.get("/v1/usage/me")).json()
    assert (after["used"], after["reserved"], after["remaining"]) == (20, 0, 980)
    assert sum(one.charged_tokens for one in await router.records()) == 20


async def test_an_estimate_that_equals_what_is_left_passes_and_one_token_more_does_not(
    router: RunningRouter,
) -> None:
    await limit(router, token_budget=100)
    assert (await router.chat(max_tokens=95)).status_code == 429
    assert (await router.chat(max_tokens=94)).status_code == 200


async def test_without_a_limit_of_its_own_a_request_reserves_the_default(
    router: RunningRouter,
) -> None:
    await limit(router, token_budget=6 + 1024 - 1)
    assert (await router.chat()).status_code == 429
    await limit(router, token_budget=6 + 1024)
    assert (await router.chat()).status_code == 200


async def test_where_less_context_is_left_than_the_default_only_that_is_reserved(
    router: RunningRouter,
) -> None:
    from backends.models import BackendModel

    await router.change(BackendModel.objects.update, context_length=100)
    await limit(router, token_budget=100)
    assert (await router.chat()).status_code == 200


async def test_responses_tell_how_the_limits_stand(router: RunningRouter) -> None:
    await limit(router, requests_per_minute=5, tokens_per_minute=1000, token_budget=10_000)
    response = await router.chat(max_tokens=94)
    told = {k: v for k, v in response.headers.items() if k.startswith("x-ratelimit")}
    assert told == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "60s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "60s",
    }
    stream = await router.chat(max_tokens=94, stream=True)
    assert stream.headers["x-ratelimit-remaining-requests"] == "3"


async def test_without_limits_no_headers_tell_of_any(router: RunningRouter) -> None:
    response = await router.chat()
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("path", "where", "kind"),
    [
        ("/v1/chat/completions", ("error", "code"), "rate_limit_exceeded"),
        ("/v1/responses", ("error", "code"), "rate_limit_exceeded"),
        ("/anthropic/v1/messages", ("error", "type"), "rate_limit_error"),
        ("/v1/messages", ("error", "type"), "rate_limit_error"),
        ("/api/chat", ("error",), None),
    ],
)
async def test_each_dialect_refuses_in_its_own_form(
    router: RunningRouter, path: str, where: tuple[str, ...], kind: str | None
) -> None:
    await limit(router, requests_per_minute=0)
    document: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    if "messages" in path:
        document["max_tokens"] = 5
    if path.endswith("responses"):
        document = {"model": "m", "input": "Hi"}
    response = await router.client.post(path, json=document)
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    value = response.json()
    for name in where:
        value = value[name]
    if kind is None:
        assert "requests_per_minute is 0" in value
    else:
        assert value == kind


async def test_waiting_can_help_within_a_minute_and_not_beyond_it(router: RunningRouter) -> None:
    await limit(router, requests_per_minute=1)
    await router.chat()
    short = await router.chat()
    assert "x-should-retry" not in short.headers
    assert 1 <= int(short.headers["retry-after"]) <= 60
    await limit(router, requests_per_minute=None, tokens_per_minute=50)
    never = await router.chat(max_tokens=100)
    assert never.headers["x-should-retry"] == "false"
    assert "which is more than the limit" in error_of(never)["message"]


@pytest.mark.parametrize("holder", ["user", "key", "model", "group total"])
async def test_concurrency_counts_what_waits_and_runs_and_frees_with_the_answer(
    router: RunningRouter, stub: OpenAIStub, holder: str
) -> None:
    match holder:
        case "user":
            await limit(router, max_concurrent=5)
        case "key":
            await router.change(ApiKey.objects.update, max_concurrent=5)
        case "model":
            await router.change(ModelLimits.objects.create, model_name="m", max_concurrent=5)
        case _:
            await router.change(Group.objects.filter(name="ada").update, total_max_concurrent=5)
    release = asyncio.Event()
    stub.behaviour = held(release)
    tasks = [asyncio.create_task(router.chat()) for _ in range(50)]
    await stub.until_calls(4)
    await router.until_waiting(1, within=30)
    while sum(task.done() for task in tasks) < 45:
        await asyncio.wait([t for t in tasks if not t.done()], return_when="FIRST_COMPLETED")
    refused = [task.result() for task in tasks if task.done()]
    assert {error_of(one)["code"] for one in refused} == {"concurrency_limit_exceeded"}
    assert "max_concurrent is 5" in error_of(refused[0])["message"]
    release.set()
    done = await asyncio.gather(*tasks)
    assert sum(one.status_code == 200 for one in done) == 5
    for _ in range(6):
        assert (await router.chat()).status_code == 200


async def test_refused_requests_use_nothing(router: RunningRouter, stub: OpenAIStub) -> None:
    await limit(router, requests_per_minute=2, token_budget=10_000)
    unknown = [await router.chat(model="nobody-has-it") for _ in range(5)]
    assert {one.status_code for one in unknown} == {404}
    await router.change(ApiKey.objects.update, max_concurrent=0)
    assert (await router.chat()).status_code == 429
    await router.change(ApiKey.objects.update, max_concurrent=None)
    assert [(await router.chat()).status_code for _ in range(3)] == [200, 200, 429]
    usage = (await router.client.get("/v1/usage/me")).json()
    assert (usage["used"], usage["reserved"]) == (20, 0)


async def test_what_a_lost_request_has_reserved_is_released_by_the_running_scheduler(
    router: RunningRouter,
) -> None:
    await limit(router, token_budget=1000, max_concurrent=1)
    ada = Holder("user", router.runtime.snapshot.keys[hash_key(router.key)].user_id)
    ledger, now = router.runtime.admission.ledger, time.monotonic()
    assert isinstance(ledger.admit("lost", [ada], 900, now, time.time()), Hold)
    assert (await router.chat()).status_code == 429

    def reserved() -> float | None:
        [use] = router.runtime.admission.use_of([ada])
        return use.budget_reserved

    assert reserved() == 900
    await until(lambda: reserved() == 0, 60.0)
    assert (await router.chat(max_tokens=900)).status_code == 200


async def test_a_failed_request_counts_as_a_request_and_costs_no_tokens(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await limit(router, requests_per_minute=1, token_budget=10_000)
    stub.behaviour = refuse(400, "no")
    assert (await router.chat()).status_code == 400
    assert (await router.chat()).status_code == 429
    usage = (await router.client.get("/v1/usage/me")).json()
    assert (usage["used"], usage["reserved"], usage["remaining"]) == (0, 0, 10_000)


async def test_a_limit_in_shadow_refuses_nothing_and_records_what_it_would_have(
    router: RunningRouter,
) -> None:
    await limit(router, requests_per_minute=1, max_concurrent=0, limits_shadow=True)
    assert [(await router.chat()).status_code for _ in range(2)] == [200, 200]
    records = await router.records()
    told = [[one["limit"] for one in record.limits_shadowed] for record in records]
    assert told == [["max_concurrent"], ["requests_per_minute", "max_concurrent"]]
    assert records[1].limits_shadowed[0] | {"resets_at": ""} == {
        "holder": "user",
        "limit": "requests_per_minute",
        "value": 1,
        "used": 1,
        "asked": 1,
        "resets_at": "",
    }
    assert router.runtime.admission.ledger.shadowed == {
        "requests_per_minute": 1,
        "max_concurrent": 2,
    }


async def test_a_budget_set_while_requests_run_counts_what_was_used_before_and_what_ends_later(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.chat()
    await router.records()  # loads the first; the second is in the spool only
    await router.chat()
    release = asyncio.Event()
    stub.behaviour = held(release)
    running = asyncio.create_task(router.chat(max_tokens=94))
    await stub.until_calls(3)
    await limit(router, token_budget=10_000)
    usage = (await router.client.get("/v1/usage/me")).json()
    assert (usage["used"], usage["reserved"]) == (20, 100)
    release.set()
    await running
    usage = (await router.client.get("/v1/usage/me")).json()
    assert (usage["used"], usage["reserved"]) == (30, 0)


async def test_a_key_for_one_model_and_one_api_gets_nothing_else(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    user = await router.ask(User.objects.get, username="ada")
    key = await router.change(make_api_key, user, allowed_models=["m"], allowed_apis=["openai"])
    await router.backend(stub, "b", models=("other",))
    assert (await router.chat(key=key)).status_code == 200
    assert (await router.chat(key=key, model="other")).status_code == 403
    headers = {"Authorization": f"Bearer {key}"}
    listed = (await router.client.get("/v1/models", headers=headers)).json()["data"]
    assert [one["id"] for one in listed] == ["m"]
    for path in ("/api/chat", "/anthropic/v1/messages"):
        document = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        assert (await router.client.post(path, json=document, headers=headers)).status_code == 403


@pytest.mark.parametrize("holder", ["key", "model"])
async def test_the_queue_bound_of_a_key_or_a_model_counts_what_waits(
    router: RunningRouter, stub: OpenAIStub, holder: str
) -> None:
    if holder == "key":
        await router.change(ApiKey.objects.update, max_queued=2)
    else:
        await router.change(ModelLimits.objects.create, model_name="m", max_queued=2)
    release = asyncio.Event()
    stub.behaviour = held(release)
    tasks = [asyncio.create_task(router.chat()) for _ in range(6)]  # four run
    await router.until_waiting(2, within=60)
    full = await router.chat()
    assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
    assert "max_queued is 2" in error_of(full)["message"]
    release.set()
    assert {one.status_code for one in await asyncio.gather(*tasks)} == {200}
    assert [(await router.chat()).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("holder", ["key", "model"])
async def test_the_longest_wait_of_a_key_or_a_model_ends_a_wait(
    router: RunningRouter, stub: OpenAIStub, holder: str
) -> None:
    if holder == "key":
        await router.change(ApiKey.objects.update, max_wait=0.05)
    else:
        await router.change(ModelLimits.objects.create, model_name="m", max_wait=0.05)
    release = asyncio.Event()
    stub.behaviour = held(release)
    tasks = [asyncio.create_task(router.chat()) for _ in range(4)]
    await stub.until_calls(4)
    late = await router.chat()
    assert (late.status_code, error_of(late)["code"]) == (503, "queue_timeout")
    release.set()
    assert {one.status_code for one in await asyncio.gather(*tasks)} == {200}


async def test_a_user_is_told_what_each_model_has_cost_this_month(router: RunningRouter) -> None:
    await router.ask(ModelPrice.objects.create, model_name="m", prompt=1_000_000, completion=2e6)
    await router.chat()
    await router.records()
    told = (await router.client.get("/v1/usage/me/models")).json()
    [row] = told["models"]
    assert (told["currency"], row["model"], row["requests"]) == ("EUR", "m", 1)
    assert (row["prompt_tokens"], row["completion_tokens"], row["cost"]) == (7, 3, 13)
