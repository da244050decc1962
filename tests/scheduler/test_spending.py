"""What has been used and what it costs; warnings of budgets and of keys that end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
from django.core import mail
from django.utils import timezone

from accounts.models import ApiKey, KeyUse
from accounts.notices import notify, remind_of_expiry
from scheduler import spending
from scheduler.budgets import load_used
from scheduler.models import ModelPrice, UsageHour
from scheduler.notices import warn_of_budgets
from tests.factories import make_admin, make_api_key, make_group, make_quota, make_user

pytestmark = pytest.mark.django_db
HOUR = datetime(2026, 6, 1, 12, tzinfo=UTC)


def used(user_id: int, model: str = "m", *, hour: datetime = HOUR, **amounts: Any) -> None:
    UsageHour.objects.create(user_id=user_id, model=model, hour=hour, **amounts)


def test_totals_are_exact_and_cost_what_each_model_does() -> None:
    ada = make_user("ada")
    ModelPrice.objects.create(
        model_name="m", prompt=Decimal("0.50"), cached=Decimal("0.10"), completion=Decimal(2)
    )
    ModelPrice.objects.create(model_name="n", prompt=1, completion=1)
    used(ada.pk, requests=3, prompt_tokens=1_000_000, cached_tokens=400_000,
         completion_tokens=250_000, estimated_tokens=7, charged_tokens=9.5)  # fmt: skip
    used(ada.pk, "n", requests=1, prompt_tokens=500_000, cached_tokens=100_000)
    used(ada.pk, "n", hour=HOUR - timedelta(hours=1), requests=1, prompt_tokens=1)
    [row] = spending.totals("user", HOUR, HOUR + timedelta(hours=1))
    assert (row["user"], row["requests"], row["prompt_tokens"]) == ("ada", 4, 1_500_000)
    assert (row["cached_tokens"], row["estimated_tokens"]) == (500_000, 7)
    # m: 0.6 M at 0.50 + 0.4 M at 0.10 + 0.25 M at 2; n: 0.5 M at 1, cached ones too.
    assert row["cost"] == pytest.approx(0.30 + 0.04 + 0.50 + 0.50)
    models = spending.totals("model", HOUR, HOUR + timedelta(hours=1))
    assert [(one["model"], one["cost"]) for one in models] == [("m", 0.84), ("n", 0.5)]


def test_without_a_price_for_all_models_there_is_no_sum() -> None:
    ModelPrice.objects.create(model_name="m", prompt=1, completion=1)
    used(1, prompt_tokens=5)
    used(1, "unpriced", prompt_tokens=5)
    [row] = spending.totals("user", HOUR, HOUR + timedelta(hours=1))
    assert row["cost"] is None


def test_a_budget_warns_once_at_each_mark_of_each_period() -> None:
    boss = make_admin("boss", email="boss@example.org")
    group = make_group("physics", total_token_budget=1000)
    ada = make_user("ada", email="ada@example.org", group=group)
    make_quota(ada, token_budget=100, budget_period="day")
    noon = HOUR.timestamp()
    used(ada.pk, group="physics", charged_tokens=79)
    assert warn_of_budgets(noon) == 0
    used(ada.pk, "n", group="physics", charged_tokens=1)
    assert [warn_of_budgets(noon) for _ in range(2)] == [1, 0]
    used(ada.pk, "o", group="physics", charged_tokens=720)
    assert [warn_of_budgets(noon) for _ in range(2)] == [2, 0]
    told = [(one.to, one.subject) for one in mail.outbox]
    assert told[0] == (["ada@example.org"], "80 % of the token budget of user ada is used")
    assert sorted(told[1:]) == [
        (["ada@example.org"], "100 % of the token budget of user ada is used"),
        ([boss.email], "80 % of the token budget of group physics is used"),
    ]
    assert warn_of_budgets(noon + 86400) == 0


def test_a_webhook_is_told_too(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Any] = []

    class Answer:
        def raise_for_status(self) -> None: ...

    def post(url: str, **options: Any) -> Answer:
        posted.append((url, options["json"]))
        return Answer()

    monkeypatch.setattr("accounts.notices.httpx.post", post)
    settings.NOTICE_WEBHOOK = "http://hooks.example/budget"
    ada = make_user("ada")
    make_quota(ada, token_budget=10)
    used(ada.pk, charged_tokens=10)
    assert warn_of_budgets(HOUR.timestamp()) == 1
    [(url, told)] = posted
    assert (url, told["kind"], told["users"]) == ("http://hooks.example/budget", "budget", ["ada"])


def not_found(url: str, **_: Any) -> httpx.Response:
    return httpx.Response(404, request=httpx.Request("POST", url))


@pytest.mark.parametrize(
    ("post", "why"), [(not_found, "it answered 404"), (httpx.post, "ConnectError")]
)
def test_a_webhook_that_fails_is_named_by_its_host_alone(
    post: Any, why: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    settings.NOTICE_WEBHOOK = "http://user:secret@127.0.0.1:9/hooks/secret?token=secret"
    monkeypatch.setattr("accounts.notices.httpx.post", post)
    notify("budget", "All is used", "", [])
    [line] = [one.getMessage() for one in caplog.records if one.name == "accounts.notices"]
    assert line.startswith("The webhook at 127.0.0.1 could not be told 'All is used': " + why)
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("address", "host", "why"),
    [
        ("http://[secret/hooks", "None", "ConnectError"),
        ("http://user:secret/x@127.0.0.1/", "user", "its address is malformed"),
    ],
)
def test_a_webhook_with_a_malformed_address_is_told_of_and_hides_as_much(
    address: str, host: str, why: str, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def not_connected(*_: Any, **__: Any) -> None:
        httpx.URL(address)  # which refuses some as they are
        raise httpx.ConnectError("No such name")

    settings.NOTICE_WEBHOOK = address
    monkeypatch.setattr("accounts.notices.httpx.post", not_connected)
    notify("budget", "All is used", "", [])
    [line] = [one.getMessage() for one in caplog.records if one.name == "accounts.notices"]
    assert line.startswith(f"The webhook at {host} could not be told 'All is used': {why}")
    assert "secret" not in line


def test_owners_are_reminded_once_of_each_end_of_a_key() -> None:
    now = timezone.now()
    ada = make_user("ada", email="ada@example.org")
    make_api_key(ada, name="soon", expires_at=now + timedelta(days=6))
    make_api_key(ada, name="later", expires_at=now + timedelta(days=8))
    make_api_key(ada, name="off", expires_at=now + timedelta(days=6), enabled=False)
    make_api_key(ada, name="never")
    assert [remind_of_expiry(now) for _ in range(2)] == [1, 0]
    assert "(soon)" in mail.outbox[0].body
    assert KeyUse.objects.get().key.name == "soon"
    ApiKey.objects.filter(name="soon").update(expires_at=now + timedelta(days=7))
    assert remind_of_expiry(now) == 1


def test_totals_of_zones_with_days_that_begin_within_an_hour_count_only_their_own(
    tmp_path: Any,
) -> None:
    """India's days begin at 18:30 UTC: of the first hour only the decisions since count."""
    from accounts.limits import Holder
    from tests.factories import make_decision

    start = datetime(2026, 6, 1, 18, 30, tzinfo=UTC)
    used(1, hour=start.replace(minute=0), charged_tokens=30)
    make_decision(user_id=1, arrived_at=start - timedelta(minutes=1), charged_tokens=10)
    make_decision(user_id=1, arrived_at=start, charged_tokens=20)
    used(1, "n", hour=start.replace(hour=19, minute=0), charged_tokens=5)
    name = (Holder("user", 1), "day")
    found = load_used({name: start.timestamp()}, start.timestamp() + 7200, (), tmp_path)
    assert found == {name: (start.timestamp(), 25)}
