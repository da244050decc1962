"""/admin/limits/: use of limits, for those who may see quotas."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from accounts.limits import Holder, LimitSet, Use
from scheduler import serving
from tests.factories import make_api_key, make_group, make_quota, make_user

pytestmark = pytest.mark.django_db


class Running:
    """A scheduler under which everybody has used 30 of 100 tokens."""

    def limits_of(self, holders: list[Holder]) -> list[Use]:
        limits = LimitSet(token_budget=100, shadow=frozenset({"token_budget"}))
        return [Use(one, limits, 0, 0, None, None, 30.0, 20.0, 1780000000.0) for one in holders]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(serving, "_current", Running())
    client = Client()
    client.force_login(make_user("auditor", is_staff=True), "accounts.authentication.RoleBackend")
    return lambda query="": client.get(f"/admin/limits/{query}")


def test_of_a_user_the_keys_and_the_group_are_shown_too(page: Any) -> None:
    make_api_key(make_user("ada", group=make_group("physics")), name="laptop")
    text = page("?user=ada").content.decode()
    for name in ("user ada", "group physics, all together", "key laptop of ada"):
        assert name in text
    assert "per day" in text
    assert "in shadow" in text
    assert page("?user=nobody").status_code == 200


def test_without_a_user_those_with_limits_of_their_own_are_shown(page: Any) -> None:
    make_quota(make_user("ada"), token_budget=5)
    make_quota(make_user("eve"), weight_override=2)
    text = page().content.decode()
    assert "user ada" in text
    assert "user eve" not in text


def test_who_is_no_staff_sees_nothing(client: Client) -> None:
    client.force_login(make_user("eve"), "accounts.authentication.RoleBackend")
    assert client.get("/admin/limits/").status_code == 302
