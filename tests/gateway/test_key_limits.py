"""Keys at the gateway: rotation, last use, and wrong keys counted by address."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from accounts.attempts import MINUTE, MOST_ADDRESSES, FailedAttempts, address_of
from accounts.models import ApiKey, KeyUse
from mindrouter.gateway import consumer
from tests.factories import make_admin, make_api_key
from tests.running import RunningRouter

WRONG = "mr-" + "0" * 64


@pytest.mark.usefixtures("backend")
async def test_a_rotated_key_and_its_predecessor_both_work_until_the_overlap_ends(
    router: RunningRouter,
) -> None:
    old = router.key

    def rotate() -> str:
        row = ApiKey.objects.get()
        key = row.rotate(timedelta(hours=1))
        row.save(update_fields=ApiKey.ROTATED)
        return key

    new = await router.change(rotate)
    assert new != old
    assert [(await router.chat(key=key)).status_code for key in (new, old)] == [200, 200]
    over = timezone.now() - timedelta(seconds=1)
    await router.change(ApiKey.objects.update, previous_until=over)
    assert [(await router.chat(key=key)).status_code for key in (new, old)] == [200, 401]
    assert len({record.key_id for record in await router.records() if record.key_id}) == 1


@pytest.mark.usefixtures("backend")
async def test_a_predecessor_whose_time_ends_is_refused_without_a_change(
    router: RunningRouter,
) -> None:
    """By the clock alone: the configuration in force still has it."""
    old = router.key

    def rotate() -> None:
        row = ApiKey.objects.get()
        row.rotate(timedelta(hours=1))
        row.save(update_fields=ApiKey.ROTATED)

    await router.change(rotate)
    known = next(k for k in router.runtime.snapshot.keys.values() if k.expires_at is not None)
    object.__setattr__(known, "expires_at", 1.0)
    assert (await router.chat(key=old)).status_code == 401


@pytest.mark.usefixtures("backend")
async def test_when_a_key_was_last_used_is_stored_later_and_changes_no_configuration(
    router: RunningRouter,
) -> None:
    before, version = timezone.now(), router.runtime.snapshot.version
    await router.chat()
    await router.chat()
    await router.runtime._store_uses_once()
    use = await router.ask(KeyUse.objects.get)
    assert before <= use.last_used_at <= timezone.now()
    await router.reload()
    assert router.runtime.snapshot.version == version


async def test_an_address_with_too_many_wrong_keys_is_told_to_wait_and_right_keys_still_pass(
    router: RunningRouter, backend: int, settings: Any
) -> None:
    settings.FAILED_KEYS_PER_MINUTE = 3
    answers = [await router.chat(key=WRONG) for _ in range(5)]
    assert [one.status_code for one in answers] == [401, 401, 401, 429, 429]
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 60
    assert (await router.chat()).status_code == 200
    anthropic = await router.client.post(
        "/anthropic/v1/messages", json={}, headers={"Authorization": f"Bearer {WRONG}"}
    )
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_an_unknown_key_costs_one_hash_and_one_look_as_a_known_one_does(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, looked, asked = [], [], []
    sha256 = hashlib.sha256

    class Keys(dict[str, Any]):
        def get(self, digest: str, default: Any = None) -> Any:
            looked.append(digest)
            return super().get(digest, default)

    def count(data: bytes = b"") -> Any:
        hashed.append(data)
        return sha256(data)

    snapshot = router.runtime.snapshot
    monkeypatch.setattr(router.runtime, "snapshot", replace(snapshot, keys=Keys(snapshot.keys)))
    monkeypatch.setattr(consumer.hashlib, "sha256", count)
    loop_thread = threading.get_ident()
    execute = CursorWrapper.execute

    def note(self: Any, sql: str, params: Any = None) -> Any:
        if threading.get_ident() == loop_thread:
            asked.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", note)
    for key, status in ((router.key, 200), (WRONG, 401), ("x" * 30_000, 401), ("", 401)):
        hashed.clear()
        looked.clear()
        headers = {"Authorization": f"Bearer {key}"} if key else {"Authorization": ""}
        answer = await router.client.get("/v1/models", headers=headers)
        assert answer.status_code == status
        assert (len(hashed), len(looked)) == ((1, 1) if key else (0, 0))
    assert asked == []


@pytest.mark.usefixtures("backend")
async def test_wrong_keys_are_counted_together_wherever_they_are_tried(
    router: RunningRouter, settings: Any
) -> None:
    settings.FAILED_KEYS_PER_MINUTE = 3
    settings.METRICS_ALLOWED = []
    root = await router.change(lambda: make_api_key(make_admin("root")))

    async def ask(path: str, key: str) -> httpx.Response:
        return await router.client.get(path, headers={"Authorization": f"Bearer {key}"})

    tried = ("/v1/models", "/api/admin/groups", "/metrics", "/api/admin/queue")
    answers = [await ask(path, WRONG) for path in tried]
    assert [one.status_code for one in answers] == [401, 401, 401, 429]
    for path in tried:
        answer = await ask(path, WRONG)
        assert (answer.status_code, "wrong API keys" in answer.text) == (429, True), path
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await ask("/api/admin/groups", "local:nobody:1:x")).status_code == 429
    for path in tried[:3]:
        assert (await ask(path, root)).status_code == 200


@pytest.mark.usefixtures("backend")
async def test_a_key_for_other_things_is_no_wrong_key(router: RunningRouter, settings: Any) -> None:
    settings.FAILED_KEYS_PER_MINUTE = 1
    settings.METRICS_ALLOWED = []
    key = await router.change(lambda: make_api_key(make_admin("root"), allowed_apis=["openai"]))
    for path, status in (("/metrics", 401), ("/api/admin/groups", 403)) * 2:
        answer = await router.client.get(path, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, "not for the management API" in answer.text) == (status, True)


def test_failures_are_counted_by_address_and_forgotten_after_a_minute() -> None:
    failed = FailedAttempts()
    assert [failed.note("a", 2, at) for at in (0.0, 10.0, 20.0)] == [None, None, 40]
    assert failed.note("b", 2, 20.0) is None
    assert failed.note("a", 2, MINUTE) is None


def test_no_more_addresses_are_kept_than_there_is_room_for() -> None:
    failed = FailedAttempts()
    for number in range(MOST_ADDRESSES + 10):
        failed.note(str(number), 1, 0.0)
    assert len(failed._counts) == MOST_ADDRESSES
    assert failed.note("0", 1, 0.0) is None  # forgotten
    assert failed.note(str(MOST_ADDRESSES), 1, 0.0) == 60


@pytest.mark.parametrize(
    ("peer", "forwarded", "trusted", "found"),
    [
        ("203.0.113.9", "198.51.100.1", [], "203.0.113.9"),
        ("10.0.0.1", "198.51.100.1", ["10.0.0.0/8"], "198.51.100.1"),
        ("10.0.0.1", "1.2.3.4, 198.51.100.1, 10.0.0.2", ["10.0.0.0/8"], "198.51.100.1"),
        ("203.0.113.9", "198.51.100.1", ["10.0.0.0/8"], "203.0.113.9"),
        ("10.0.0.1", "", ["10.0.0.0/8"], "10.0.0.1"),
        ("2001:db8:1:2:3::4", "", [], "2001:db8:1:2::/64"),
    ],
)
def test_the_address_is_what_trusted_proxies_say_and_nobody_else(
    settings: Any, peer: str, forwarded: str, trusted: list[str], found: str
) -> None:
    settings.TRUSTED_PROXIES = trusted
    headers = [(b"x-forwarded-for", forwarded.encode())] if forwarded else []
    assert address_of(peer, headers) == found
