"""``manage.py key``: keys from the command line."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from accounts.models import ApiKey, hash_key
from tests.factories import make_api_key, make_user

pytestmark = pytest.mark.django_db


def key(*arguments: str) -> str:
    out = io.StringIO()
    call_command("key", *arguments, stdout=out)
    return out.getvalue()


def test_a_new_key_is_printed_and_only_its_hash_is_kept() -> None:
    make_user("ada")
    printed = key(
        "create", "ada", "--name", "laptop", "--expires", "2030-12-31", "--may-name-end-user"
    ).strip()
    assert len(printed) == 67
    row = ApiKey.objects.get(sha256=hash_key(printed))
    assert (row.user.username, row.name, row.enabled) == ("ada", "laptop", True)
    assert row.expires_at == datetime(2030, 12, 31, tzinfo=UTC)
    assert row.may_name_end_user
    assert printed not in str(ApiKey.objects.values().get())


def test_json_carries_the_new_key_and_the_list_does_not() -> None:
    make_user("ada")
    made = json.loads(key("create", "ada", "--name", "laptop", "--json"))
    described = {
        "user": "ada",
        "name": "laptop",
        "prefix": made["key"][:9],
        "enabled": True,
        "expires_at": None,
        "may_name_end_user": False,
        "capture_until": None,
    }
    assert made == described | {"key": made["key"]}
    assert json.loads(key("list", "--json")) == [described]


def test_a_revoked_key_stays_listed_and_is_refused() -> None:
    secret = make_api_key(make_user("ada"), name="laptop")
    assert (
        key("revoke", "ada", "--name", "laptop") == f"{secret[:9]}… (laptop) of ada is revoked.\n"
    )
    assert not ApiKey.objects.get().enabled
    assert key("list") == f"ada  laptop  {secret[:9]}…  revoked\n"


def test_the_list_says_whose_prompts_are_captured() -> None:
    secret = make_api_key(make_user("ada"), name="laptop")
    until = timezone.now() + timedelta(hours=1)
    ApiKey.objects.update(capture_until=until, capture_reason="a bug", capture_days=7)
    told = f"prompts captured until {until.isoformat()}"
    assert key("list") == f"ada  laptop  {secret[:9]}…  enabled, {told}\n"
    ApiKey.objects.update(capture_until=timezone.now())
    assert key("list") == f"ada  laptop  {secret[:9]}…  enabled\n"


def test_the_list_can_be_of_one_user() -> None:
    make_api_key(make_user("ada"), name="a")
    make_api_key(make_user("bob"), name="b")
    assert [one["user"] for one in json.loads(key("list", "bob", "--json"))] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "eve", "--name", "x"], "There is no user 'eve'"),
        (["create", "ada", "--name", "laptop"], "already exists"),
        (["create", "ada", "--name", ""], "blank"),
        (["create", "ada", "--name", "x", "--expires", "soon"], "expires"),
        (["revoke", "ada", "--name", "x"], "ada has no key named 'x'"),
        (["list", "eve"], "There is no user 'eve'"),
    ],
)
def test_mistakes_are_said_and_make_no_key(arguments: list[str], message: str) -> None:
    make_api_key(make_user("ada"), name="laptop")
    with pytest.raises(CommandError, match=message):
        key(*arguments)
    assert ApiKey.objects.count() == 1
