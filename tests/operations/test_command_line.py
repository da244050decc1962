"""``manage.py share, queue, prio, explain, backends, drain, resume, usage, key``: over the API."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from accounts.authentication import local_pass
from accounts.models import ApiKey, Group, hash_key
from backends.models import Backend
from mindrouter.cli.management import Management, write_address
from tests.factories import make_admin, make_api_key, make_user
from tests.running import RunningRouter
from tests.stubs.openai_stub import OpenAIStub


async def said(name: str, *arguments: str) -> str:
    """What a command prints, run in a thread as if it were another process."""

    def run() -> str:
        out = io.StringIO()
        try:
            call_command(name, *arguments, stdout=out)
        finally:
            connection.close()
        return out.getvalue()

    return await asyncio.to_thread(run)


@pytest.fixture
async def site(router: RunningRouter, settings: Any, tmp_path: Any) -> RunningRouter:
    """With a superuser, found as a local site is found."""
    settings.DATA_DIR = tmp_path
    write_address("127.0.0.1", router.port)
    await router.ask(make_admin, "root")
    return router


@pytest.fixture
async def waiting(site: RunningRouter, stub: OpenAIStub, backend: int) -> Any:
    """Two requests of ada that wait, as the one backend is paused."""
    await site.change(Backend.objects.filter(pk=backend).update, paused=True)
    asked = [asyncio.create_task(site.chat()) for _ in range(2)]
    await site.until_waiting(2)
    yield site
    await site.change(Backend.objects.filter(pk=backend).update, paused=False)
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]


async def test_shares_are_told_by_group_and_by_user(waiting: RunningRouter) -> None:
    await waiting.change(Group.objects.filter(name="ada").update, scheduler_weight=3)
    found = json.loads(await said("share", "--json"))
    (group,) = [one for one in found["groups"] if one["name"] == "ada"]
    assert (group["weight"], group["entitled"], group["queued"]) == (3, 1.0, 2)
    (user,) = found["users"]
    assert (user["username"], user["entitled"], user["received"]) == ("ada", 1.0, None)
    text = await said("share", "--group", "ada")
    assert "100.0 %" in text
    assert "student" not in text


async def test_the_queue_is_told_in_order_and_with_estimates(waiting: RunningRouter) -> None:
    found = json.loads(await said("queue", "--json"))
    assert [one["position"] for one in found["results"]] == [1, 2]
    assert {one["estimate_seconds"] for one in found["results"]} == {None}  # nothing was served yet
    text = await said("queue", "--start", "--limit", "1")
    assert found["results"][0]["request_id"] in text
    assert "starts in" in text
    assert "… and 1 more." in text


async def test_a_waiting_request_is_explained(waiting: RunningRouter) -> None:
    first = json.loads(await said("queue", "--json"))["results"][0]
    parts = json.loads(await said("prio", first["request_id"], "--json"))
    assert (parts["state"], parts["position"], parts["weight"]) == ("waiting", 1, 1)
    later = json.loads(await said("queue", "--json"))["results"][0]
    assert first["priority"] <= parts["priority"] <= later["priority"]  # it waits on
    assert later["request_id"] == first["request_id"]
    assert "is served as number 1" in await said("explain", first["request_id"])


async def test_an_ended_request_is_explained(site: RunningRouter, backend: int) -> None:
    request_id = (await site.chat()).headers["x-request-id"]
    await site.record()
    told = json.loads(await said("explain", request_id, "--json"))
    text = await said("explain", request_id)
    assert told["explanation"] in text
    assert "points" in text
    assert json.loads(await said("prio", request_id, "--json"))["state"] == "completed"
    with pytest.raises(CommandError, match="404 Not Found"):
        await said("explain", "none-such")


async def test_a_backend_is_drained_and_resumed(site: RunningRouter, backend: int) -> None:
    assert "a  " in await said("backends")
    await said("drain", "a")
    assert (await site.ask(Backend.objects.get, name="a")).draining
    await said("resume", "a")
    assert not (await site.ask(Backend.objects.get, name="a")).draining
    await site.change(Backend.objects.filter(name="a").update, enabled=False)
    await said("resume", "a")
    assert (await site.ask(Backend.objects.get, name="a")).enabled
    (one,) = json.loads(await said("backends", "--json"))
    assert (one["name"], one["live"]["max_concurrent"]) == ("a", 4)
    with pytest.raises(CommandError, match="there is no b"):
        await said("drain", "b")


async def test_usage_of_this_month_is_told_by_group(site: RunningRouter, backend: int) -> None:
    await site.chat()
    record = await site.record()
    found = json.loads(await said("usage", "--by", "group", "--month", "--json"))
    (row,) = found["rows"]
    assert (row["name"], row["requests"]) == ("ada", 1)
    assert row["charged_tokens"] == record.charged_tokens
    assert "ada" in await said("usage", "--by", "group", "--month")
    assert json.loads(await said("usage", "--month", "2020-02", "--json"))["rows"] == []


async def test_keys_of_another_site_are_made_rotated_and_revoked(site: RunningRouter) -> None:
    root = await site.ask(lambda: make_api_key(make_admin("boss")))
    there = ("--url", site.url, "--key", root)
    made = (await said("key", "create", "ada", "--name", "phone", *there)).strip()
    assert (await site.ask(ApiKey.objects.get, sha256=hash_key(made))).name == "phone"
    anew = json.loads(await said("key", "rotate", "ada", "--name", "phone", "--json", *there))
    assert anew["key"] != made
    assert "of ada is revoked" in await said("key", "revoke", "ada", "--name", "phone", *there)
    assert not (await site.ask(ApiKey.objects.get, sha256=hash_key(anew["key"]))).enabled
    assert "phone" in await said("key", "list", "ada", *there)


async def test_who_may_not_is_told_so(site: RunningRouter) -> None:
    for key, problem in ((site.key, "403"), ("mr-wrong", "401")):
        with pytest.raises(CommandError, match=problem):
            await said("share", "--url", site.url, "--key", key)
    with pytest.raises(CommandError, match="A key is needed"):
        await said("share", "--url", site.url)


async def test_a_site_that_does_not_answer_is_named(settings: Any, tmp_path: Any) -> None:
    settings.DATA_DIR = tmp_path
    with pytest.raises(CommandError, match="No router has been started"):
        await said("share")
    with pytest.raises(CommandError, match="does not answer"):
        await said("share", "--url", "http://127.0.0.1:9", "--key", "x")


@pytest.mark.django_db
@pytest.mark.parametrize(
    "spoilt", [lambda good: good[:-1] + "_", lambda good: good.replace("root", "ada")]
)
def test_a_local_pass_cannot_be_made_up(client: Any, spoilt: Callable[[str], str]) -> None:
    make_admin("root"), make_user("ada", is_staff=True)
    good = local_pass("root")

    def ask(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return int(client.get("/api/admin/groups", headers=headers).status_code)

    assert (ask(good), ask(spoilt(good))) == (200, 401)


def test_an_old_local_pass_is_refused(
    db: None, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_admin("root")
    good = local_pass("root")
    monkeypatch.setattr("accounts.authentication._LOCAL_SECONDS", -1)
    answer = client.get("/api/admin/groups", headers={"Authorization": f"Bearer {good}"})
    assert answer.status_code == 401


def test_a_name_that_is_allowed_goes_along(settings: Any, tmp_path: Any, db: None) -> None:
    settings.DATA_DIR = tmp_path
    settings.ALLOWED_HOSTS = [".uni.example", "llm.uni.example"]
    write_address("0.0.0.0", 8010)
    make_admin("root")
    with Management.of(None, None) as api:
        assert str(api._client.base_url) == "http://127.0.0.1:8010/api/admin/"
        assert api._client.headers["host"] == "llm.uni.example"


async def test_a_site_that_sends_browsers_to_https_answers_here(
    site: RunningRouter, settings: Any
) -> None:
    settings.SECURE_SSL_REDIRECT = True
    assert "group" in await said("share")
