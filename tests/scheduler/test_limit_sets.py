"""Whose value a limit has, and whose shadow it stands in."""

from __future__ import annotations

from typing import Any

import pytest

from accounts.limits import Holder, LimitSet
from accounts.models import ModelLimits
from scheduler.budgets import load_limits
from scheduler.snapshot import _user_spec
from tests.factories import make_api_key, make_group, make_quota, make_user

pytestmark = pytest.mark.django_db


def limits_of(quota: dict[str, Any] | None, **group: Any) -> tuple[LimitSet, Any]:
    """What holds for a member with this quota in this group, and what the core knows of it."""
    user = make_user(group=make_group(**group))
    if quota is not None:
        make_quota(user, **quota)
    user.refresh_from_db()
    found = load_limits({}).get(Holder("user", user.pk), LimitSet())
    return found, _user_spec(user)


def test_a_groups_shadow_leaves_the_quotas_of_its_members_in_force() -> None:
    limits, spec = limits_of(
        {"requests_per_minute": 5, "max_concurrent": 2, "max_queued": 3},
        requests_per_minute=60,
        tokens_per_minute=1000,
        limits_shadow=True,
    )
    assert (limits.requests_per_minute, limits.max_concurrent) == (5, 2)
    assert limits.tokens_per_minute == 1000
    assert limits.shadow == {"tokens_per_minute"}
    assert (spec.max_concurrent, spec.max_queued) == (2, 3)


def test_a_quotas_shadow_leaves_the_groups_values_in_force_where_it_has_none() -> None:
    limits, spec = limits_of(
        {"requests_per_minute": 5, "limits_shadow": True}, tokens_per_minute=1000, max_concurrent=2
    )
    assert (limits.requests_per_minute, limits.tokens_per_minute) == (5, 1000)
    assert "requests_per_minute" in limits.shadow
    assert not limits.shadow & {"tokens_per_minute", "max_concurrent"}
    assert spec.max_concurrent == 2


def test_a_quota_of_zero_is_a_value_and_keeps_its_own_shadow() -> None:
    limits, _ = limits_of({"token_budget": 0}, token_budget=9, limits_shadow=True)
    assert (limits.token_budget, limits.shadow) == (0, frozenset())


def test_members_without_a_quota_stand_in_their_groups_shadow() -> None:
    limits, spec = limits_of(None, max_concurrent=2, max_queued=4, limits_shadow=True)
    assert (limits.max_concurrent, limits.shadow) == (2, {"max_concurrent"})
    assert (spec.max_concurrent, spec.group_max_queued) == (None, None)


def test_a_queue_bound_in_shadow_is_counted_and_refuses_nothing() -> None:
    limits, spec = limits_of({"max_queued": 3, "limits_shadow": True})
    assert (limits.max_queued, spec.max_queued) == (3, None)
    assert "max_queued" in limits.shadow
    group = make_group(max_queued=4, limits_shadow=True)
    limits = load_limits({})[Holder("group", group.pk)]
    assert limits.max_queued == 4
    assert "max_queued" in limits.shadow


def test_of_keys_models_and_groups_as_a_whole_each_has_its_own_shadow() -> None:
    group = make_group(total_token_budget=7, limits_shadow=True)
    user = make_user(group=group)
    make_api_key(user, max_concurrent=1)
    make_api_key(user, max_concurrent=1, limits_shadow=True)
    ModelLimits.objects.create(model_name="a", max_queued=1)
    ModelLimits.objects.create(model_name="b", max_queued=1, limits_shadow=True)
    found = load_limits({})
    plain, tried = user.api_keys.order_by("pk")
    assert "token_budget" in found[Holder("group", group.pk)].shadow
    assert found[Holder("key", plain.pk)].shadow == frozenset()
    assert found[Holder("key", tried.pk)].shadow == {"max_concurrent"}
    assert found[Holder("model", "a")].shadow == frozenset()
    assert found[Holder("model", "b")].shadow == {"max_queued"}
