"""``manage.py export``: prints what is there, without secrets, and applies as no change."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import yaml
from django.core.management import call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from accounts.models import ApiKey, Group, Quota, User
from backends.models import Backend, BackendModel
from scheduler.configuration.applying import apply_text
from scheduler.configuration.document import write_document
from scheduler.configuration.exporting import export_text
from scheduler.models import ConfigurationVersion, SiteSettings
from tests.factories import make_api_key, make_backend, make_group, make_quota, make_user


@pytest.mark.django_db
def test_the_form_is_that_of_apply_with_every_field_but_secrets() -> None:
    Group.objects.all().delete()
    group = make_group("physics", scheduler_weight=Decimal("0.5"), allowed_models=["m"])
    user = make_user("ada", password="a secret", group=group)
    make_quota(user, weight_override=3, max_wait=2.5)
    key = make_api_key(user, name="laptop", expires_at=datetime(2030, 1, 1, tzinfo=UTC))
    make_backend(
        "a", base_url="http://gpu-1:8000", api_key="sk-secret", max_concurrent=4, max_queue=16
    )
    BackendModel.objects.create(
        backend=Backend.objects.get(), name="m", vram_mib=800, vision=False, speech=True
    )
    BackendModel.objects.create(
        backend=Backend.objects.get(), name="found", by_hand=False, listed=True
    )
    SiteSettings.objects.create(pk=1, share_mode="group", quantum=500)
    out = io.StringIO()
    call_command("export", stdout=out)
    text = out.getvalue()
    limits = {
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "max_concurrent": None,
        "token_budget": None,
        "budget_period": None,
        "max_wait": None,
        "max_queued": None,
        "limits_shadow": False,
    }
    totals = {
        f"total_{name}": None
        for name in limits
        if not name.startswith("max_wait") and name not in ("max_queued", "limits_shadow")
    }
    exported = yaml.safe_load(text)
    [backend] = exported.pop("backends")
    assert (
        backend.items()
        >= {
            "name": "a",
            "node": None,
            "base_url": "http://gpu-1:8000",
            "engine": "auto",
            "max_concurrent": 4,
            "max_queue": 16,
            "priority": 0,
            "enabled": True,
            "draining": False,
            "connect_timeout": 5,
            "first_byte_timeout": 600,
            "chunk_timeout": 120,
            "poll_interval": 5,
            "models": [
                {
                    "name": "m",
                    "context_length": None,
                    "vram_mb": 800,
                    "vision": False,
                    "tools": None,
                    "json": None,
                    "embeddings": None,
                    "rerank": None,
                    "transcription": None,
                    "speech": True,
                    "images": None,
                    "moderation": None,
                }
            ],
        }.items()
    )
    assert exported == {
        "groups": [
            {"name": "physics", "description": "", "scheduler_weight": 0.5}
            | limits
            | totals
            | {"allowed_models": ["m"]}
        ],
        "users": [
            {
                "username": "ada",
                "group": "physics",
                "first_name": "",
                "last_name": "",
                "email": "",
                "role": "user",
                "is_staff": False,
                "is_superuser": False,
                "is_active": True,
            }
        ],
        "quotas": [{"user": "ada", "weight_override": 3} | limits | {"max_wait": 2.5}],
        "api_keys": [
            {
                "user": "ada",
                "name": "laptop",
                "enabled": True,
                "expires_at": "2030-01-01T00:00:00+00:00",
                "may_name_end_user": False,
                "allowed_models": None,
                "allowed_apis": None,
                "capture_until": None,
                "capture_reason": "",
                "capture_days": None,
            }
            | limits
        ],
        "boosts": [],
        "nodes": [],
        "model_limits": [],
        "model_prices": [],
        "aliases": [],
        "strategies": [],
        "settings": {"share_mode": "group", "quantum": 500},
    }
    for secret in (key, ApiKey.objects.get().sha256, user.password, "a secret", "sk-secret"):
        assert secret not in text


@pytest.mark.django_db
def test_what_an_admin_set_on_a_found_model_survives() -> None:
    row = BackendModel.objects.create(
        backend=make_backend("a"), name="m", by_hand=False, listed=True, tools=True
    )
    assert apply_text(export_text()).lines == []
    row.refresh_from_db()
    assert (row.by_hand, row.tools) == (False, True)


@pytest.mark.django_db
def test_an_export_makes_another_site_the_same() -> None:
    user = make_user(
        "ada", group=make_group("physics", scheduler_weight=2), email="ada@example.org"
    )
    make_quota(user, max_queued=3)
    make_backend("a", models=("m", "n"))
    text = export_text()
    for model in (User, Group, Backend):
        model.objects.all().delete()
    apply_text(text)
    assert export_text() == text


# ---- property: whatever is applied, exporting and applying again changes nothing

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)
names = st.one_of(
    texts.filter(lambda name: name.strip() != ""),
    st.sampled_from(["1e9", "no", "null", "~", "2026-01-01", "- a", "a: b", "#", "0x10", "1_000"]),
)
printable = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
usernames = (
    st.from_regex(r"[\w.@+-]{1,20}", fullmatch=True)
    .map(User.normalize_username)
    .filter(re.compile(r"[\w.@+-]{1,150}").fullmatch)
)
counts = st.none() | st.integers(0, 2**31 - 1)
weights = st.none() | st.decimals(0, 10**9, places=6).map(float) | st.integers(0, 10**9)
seconds = st.none() | st.floats(0, 1e300)
flags = st.booleans()
limits = {
    "requests_per_minute": counts,
    "tokens_per_minute": st.none() | st.integers(0, 2**63 - 1),
    "max_concurrent": counts,
    "token_budget": counts,
    "budget_period": st.sampled_from(["day", "week", "month", None]),
    "max_wait": seconds,
    "max_queued": counts,
}


def some(fields: dict[str, Any], **always: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Entries with these fields always and any of the others."""
    return st.fixed_dictionaries(always, optional=fields)


def lists(entries: st.SearchStrategy[dict[str, Any]], *key: str) -> st.SearchStrategy[Any]:
    if entries.is_empty:
        return st.just([])
    return st.lists(entries, max_size=3, unique_by=lambda entry: tuple(entry[k] for k in key))


models = some(
    {
        "context_length": counts,
        "vram_mb": st.none() | st.floats(0, 1e6),
        "vision": st.none() | flags,
        "json": st.none() | flags,
        "rerank": st.none() | flags,
        "images": st.none() | flags,
        "by_hand": flags,
    },
    name=names,
)


EARLY, LATE = datetime(1990, 1, 1), datetime(2050, 1, 1)  # noqa: DTZ001  the strategy adds it


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Files that refer only to what they make."""
    groups = draw(
        lists(
            some(
                limits
                | {
                    "description": texts,
                    "scheduler_weight": weights,
                    "allowed_models": st.none() | st.lists(names, max_size=3),
                },
                name=names,
            ),
            "name",
        )
    )
    group = st.sampled_from([None, *(entry["name"] for entry in groups)])
    users = draw(
        lists(
            some({"group": group, "is_staff": flags, "is_active": flags}, username=usernames),
            "username",
        )
    )
    owners = st.sampled_from([entry["username"] for entry in users]) if users else st.nothing()
    return {
        "groups": groups,
        "users": users,
        "quotas": draw(lists(some(limits | {"weight_override": weights}, user=owners), "user")),
        "api_keys": draw(
            lists(
                some(
                    {
                        "enabled": flags,
                        "expires_at": st.none() | st.datetimes(timezones=st.just(UTC)),
                    },
                    user=owners,
                    name=names,
                    key=st.from_regex(r"[!-~]{32,64}", fullmatch=True),
                ),
                "key",
            ).filter(lambda keys: len({(k["user"], k["name"]) for k in keys}) == len(keys))
        ),
        "boosts": draw(
            lists(
                st.fixed_dictionaries(
                    {
                        "name": names,
                        "user": owners,
                        "factor": weights.filter(lambda factor: factor is not None),
                        "starts_at": st.datetimes(EARLY, LATE, timezones=st.just(UTC)),
                        "ends_at": st.just(LATE.replace(year=2051, tzinfo=UTC)),
                    },
                    optional={"reason": texts},
                ),
                "name",
            )
        ),
        "backends": draw(
            lists(
                some(
                    {
                        "engine": st.sampled_from(["auto", "vllm", "ollama"]),
                        "api_key": st.none() | st.from_regex(r"[!-~]{1,40}", fullmatch=True),
                        "max_concurrent": st.integers(0, 2**31 - 1),
                        "priority": st.floats(-1e6, 1e6),
                        "enabled": flags,
                        "chunk_timeout": st.floats(0.001, 1e5),
                        "models": lists(models, "name"),
                    },
                    name=printable,
                    base_url=st.sampled_from(["http://a:1", "https://[::1]:2/v1"]),
                ),
                "name",
            )
        ),
        "aliases": draw(
            lists(some({}, name=names, targets=st.lists(names, min_size=1, max_size=3)), "name")
        ),
        "settings": draw(
            some({"share_mode": st.sampled_from(["user", "group", None]), "max_queued": counts})
        ),
    }


class RoundTrip(TestCase):
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(documents())
    def test_applying_an_export_is_a_no_op(self, document: dict[str, Any]) -> None:
        apply_text(write_document(document))
        exported = export_text()
        version = ConfigurationVersion.objects.get().version
        history = [model.history.count() for model in (Group, User, Quota, ApiKey, Backend)]  # type: ignore[attr-defined]
        assert apply_text(exported).lines == []
        assert ConfigurationVersion.objects.get().version == version
        assert [m.history.count() for m in (Group, User, Quota, ApiKey, Backend)] == history  # type: ignore[attr-defined]
        assert export_text() == exported
        # And the file itself says nothing new either.
        assert apply_text(write_document(document)).lines == []
