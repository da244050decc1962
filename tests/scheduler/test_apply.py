"""``manage.py apply``: partial, whole or not at all, and silent when nothing differs."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from django.contrib.auth import authenticate
from django.core.management import CommandError, call_command
from pytest_django import DjangoAssertNumQueries

from accounts.models import ApiKey, Group, Quota, User, hash_key
from backends.models import Alias, Backend, BackendModel, ModelStrategy, Node
from scheduler.configuration.applying import Changes, apply_text
from scheduler.configuration.document import Invalid, write_document
from scheduler.management.commands import apply
from scheduler.models import ConfigurationVersion, SiteSettings
from tests.factories import make_api_key, make_backend, make_group, make_user

pytestmark = pytest.mark.django_db

KEY = "mr-" + "0123456789abcdef" * 4

WHOLE = f"""
groups: [{{name: physics, scheduler_weight: 3, requests_per_minute: null, tokens_per_minute: 0,
          max_concurrent: 4, token_budget: 1000, budget_period: day, max_wait: 60,
          max_queued: null, allowed_models: [m, n]}}]
users: [{{username: ada, group: physics, password: "a long secret", is_staff: true}}]
quotas: [{{user: ada, weight_override: 0.5, max_concurrent: 0, budget_period: null}}]
api_keys: [{{user: ada, name: laptop, key: {KEY}, expires_at: "2030-01-01T00:00:00Z",
            may_name_end_user: true}}]
nodes: [{{name: gpu-1, telemetry_key: sk-2}}]
backends: [{{name: a, base_url: "http://127.0.0.1:9001/v1", engine: vllm, api_key: sk-1,
            max_concurrent: 4, max_queue: 16, priority: 1, chunk_timeout: 7, node: gpu-1,
            models: [{{name: m, context_length: 4096, vram_mb: 800, vision: false}}, {{name: n}}]}}]
aliases: [{{name: small, targets: [m, n]}}]
strategies: [{{model_name: m, strategy: affinity}}]
settings: {{share_mode: group, backend_fail_window: 12.5, max_queued: 100}}
"""


def refusals(text: str) -> list[str]:
    with pytest.raises(Invalid) as refused:
        apply_text(text)
    return refused.value.errors


def version() -> int:
    return ConfigurationVersion.objects.get().version


def history_rows() -> int:
    return sum(
        model.history.count()  # type: ignore[attr-defined]
        for model in (Group, User, Quota, ApiKey, Node, Backend, Alias, ModelStrategy, SiteSettings)
    )


# ---- what it makes


def test_every_section_becomes_rows() -> None:
    changes = apply_text(WHOLE)
    group = Group.objects.get(name="physics")
    assert group.scheduler_weight == 3
    assert (group.requests_per_minute, group.tokens_per_minute) == (None, 0)
    assert (group.max_wait, group.allowed_models) == (60, ["m", "n"])
    user = User.objects.get(username="ada")
    assert (user.group, user.is_staff, user.is_superuser, user.is_active) == (
        group,
        True,
        False,
        True,
    )
    assert user.quota.weight_override == Decimal("0.5")
    assert user.quota.max_concurrent == 0
    key = ApiKey.objects.get()
    assert (key.user, key.name, key.sha256, key.prefix) == (
        user,
        "laptop",
        hash_key(KEY),
        "mr-012345",
    )
    assert key.expires_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert key.may_name_end_user
    backend = Backend.objects.get()
    assert (backend.engine, backend.api_key, backend.max_queue) == ("vllm", "sk-1", 16)
    assert (backend.chunk_timeout, backend.connect_timeout) == (7, 5)
    assert backend.node == Node.objects.get(name="gpu-1", telemetry_url="")
    assert backend.node.telemetry_key == "sk-2"
    models = BackendModel.objects.values_list(
        "name", "by_hand", "listed", "context_length", "vram_mib", "vision", "tools"
    )
    assert list(models) == [
        ("m", True, False, 4096, 800, False, None),
        ("n", True, False, None, None, None, None),
    ]
    assert Alias.objects.get().targets == ["m", "n"]
    assert ModelStrategy.objects.get().strategy == "affinity"
    site = SiteSettings.objects.get(pk=1)
    assert (site.share_mode, site.backend_fail_window, site.max_queued) == ("group", 12.5, 100)
    assert changes.lines == [
        "+ group physics",
        "+ user ada",
        "+ quota of ada",
        "+ API key ada/laptop",
        "+ node gpu-1",
        "+ backend a",
        "+ model m of backend a",
        "+ model n of backend a",
        "+ alias small",
        "+ strategy of m",
        (
            "~ settings: share_mode null → group, backend_fail_window null → 12.5, "
            "max_queued null → 100"
        ),
    ]
    assert changes.backend_ids == [backend.pk]


def test_the_password_is_hashed_with_argon2_and_opens_the_account() -> None:
    apply_text(WHOLE)
    user = User.objects.get(username="ada")
    assert user.password.startswith("argon2$")
    assert user.check_password("a long secret")


def test_a_user_without_a_password_cannot_sign_in() -> None:
    apply_text("users: [{username: ada}]")
    assert not User.objects.get().has_usable_password()


def test_applying_twice_changes_nothing_at_all() -> None:
    apply_text(WHOLE)
    before = version(), history_rows()
    assert apply_text(WHOLE) == Changes(lines=[], backend_ids=[])
    assert (version(), history_rows()) == before


def test_an_unchanged_file_costs_few_queries_however_long_it_is(
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    text = write_document(
        {
            "groups": [{"name": "physics"}],
            "users": [{"username": f"u{n}", "group": "physics"} for n in range(50)],
            "api_keys": [{"user": f"u{n}", "name": "k", "key": f"{n:064x}"} for n in range(50)],
        }
    )
    apply_text(text)
    with django_assert_max_num_queries(8):
        assert apply_text(text).lines == []


def test_a_change_raises_the_version_and_is_kept_as_history() -> None:
    make_group("physics", scheduler_weight=1)
    before = version()
    apply_text("groups: [{name: physics, scheduler_weight: 2}]", reason="apply site.yaml")
    assert version() > before
    newest = Group.objects.get(name="physics").history.first()
    assert newest is not None
    assert newest.scheduler_weight == 2
    assert newest.history_change_reason == "apply site.yaml"


def test_what_the_file_does_not_name_stays() -> None:
    make_group("physics", scheduler_weight=7, max_queued=3)
    make_group("biology")
    user = make_user("ada", password="kept secret", is_staff=True)
    make_api_key(user, KEY, name="laptop")
    apply_text(
        """
        groups: [{name: physics, max_queued: 4}]
        users: [{username: ada, group: physics}]
        api_keys: [{user: ada, name: laptop, enabled: false}]
        """
    )
    physics = Group.objects.get(name="physics")
    assert (physics.scheduler_weight, physics.max_queued) == (7, 4)
    assert Group.objects.filter(name="biology").exists()
    user.refresh_from_db()
    assert user.group == physics
    assert user.is_staff
    assert user.check_password("kept secret")
    key = ApiKey.objects.get()
    assert (key.enabled, key.sha256) == (False, hash_key(KEY))


@pytest.mark.parametrize("text", ["", "groups:", "groups: []", "settings: {}", "{}"])
def test_an_empty_file_changes_nothing(text: str) -> None:
    before = version()
    assert apply_text(text).lines == []
    assert version() == before
    assert not SiteSettings.objects.exists()


def test_names_and_addresses_that_are_stored_in_another_form_are_no_difference() -> None:
    text = "users: [{username: ﬁnn, email: Finn@Example.ORG}]\nquotas: [{user: ﬁnn}]"
    apply_text(text)
    user = User.objects.get()
    assert (user.username, user.email) == ("finn", "Finn@example.org")
    before = version()
    assert apply_text(text).lines == []
    assert version() == before


def test_null_takes_a_limit_away_and_a_zero_allows_nothing() -> None:
    make_group("physics", max_concurrent=3, scheduler_weight=2, max_wait=5)
    apply_text("groups: [{name: physics, max_concurrent: null, scheduler_weight: 0, max_wait: 0}]")
    physics = Group.objects.get(name="physics")
    assert (physics.max_concurrent, physics.scheduler_weight, physics.max_wait) == (None, 0, 0)


@pytest.mark.parametrize(
    ("written", "weight"),
    [("1e9", "1000000000"), ("0.05", "0.05"), ("1000000000.0", "1000000000"), ("3", "3")],
)
def test_weights_in_every_way_of_writing_numbers(written: str, weight: str) -> None:
    apply_text(f"groups: [{{name: physics, scheduler_weight: {written}}}]")
    assert Group.objects.get(name="physics").scheduler_weight == Decimal(weight)


def test_a_rotated_key_replaces_the_old_one() -> None:
    make_api_key(make_user("ada"), KEY, name="laptop")
    changes = apply_text(f"api_keys: [{{user: ada, name: laptop, key: {KEY[::-1]}}}]")
    assert ApiKey.objects.get().sha256 == hash_key(KEY[::-1])
    assert changes.lines == ["~ API key ada/laptop: key changed"]


def test_a_new_password_is_taken_and_never_shown() -> None:
    user = make_user("ada", password="old secret")
    changes = apply_text("users: [{username: ada, password: brand-new}]")
    user.refresh_from_db()
    assert user.check_password("brand-new")
    assert changes.lines == ["~ user ada: password changed"]
    assert authenticate(username="ada", password="old secret", request=_request()) is None


def _request() -> object:
    from django.test import RequestFactory

    return RequestFactory().post("/admin/login/")


def test_a_changed_backend_is_named_with_old_and_new_values() -> None:
    make_backend("a", max_concurrent=4, api_key="sk-1", models=("m",))
    other = make_backend("b")
    changes = apply_text(
        """
        backends:
          - {name: a, max_concurrent: 8, draining: true, api_key: sk-2,
             models: [{name: m, vision: true}]}
          - {name: b, models: []}
        """
    )
    assert changes.lines == [
        "~ backend a: max_concurrent 4 → 8, draining false → true, api_key changed",
        "~ model m of backend a: vision null → true",
    ]
    assert changes.backend_ids == [Backend.objects.get(name="a").pk]
    assert other.pk not in changes.backend_ids


# ---- models given by hand


def test_given_models_replace_those_by_hand_and_leave_those_that_polls_found() -> None:
    backend = make_backend("a", models=("old",))
    for name in ("found", "corrected"):
        BackendModel.objects.create(
            backend=backend, name=name, by_hand=False, listed=True, detected_vision=True
        )
    BackendModel.objects.filter(name="corrected").update(vision=False, by_hand=True)
    apply_text("backends: [{name: a, models: [{name: new}, {name: found, vision: false}]}]")
    rows = BackendModel.objects.values_list("name", "by_hand", "listed", "vision")
    assert list(rows) == [
        ("corrected", False, True, None),
        ("found", True, True, False),
        ("new", True, False, None),
    ]
    assert BackendModel.objects.get(name="found").detected_vision is True


def test_models_not_given_stay() -> None:
    make_backend("a", models=("m",))
    apply_text("backends: [{name: a, max_queue: 1}]")
    assert BackendModel.objects.get().name == "m"


# ---- absent: true


def test_absent_entries_are_removed_with_what_hangs_on_them() -> None:
    apply_text(WHOLE)
    changes = apply_text(
        """
        groups: [{name: physics, absent: true}]
        users: [{username: ada, absent: true}]
        backends: [{name: a, absent: true}]
        aliases: [{name: small, absent: true}]
        """
    )
    assert changes.lines == ["- alias small", "- backend a", "- user ada", "- group physics"]
    assert not Group.objects.filter(name="physics").exists()
    for model in (User, Quota, ApiKey, Backend, BackendModel, Alias):
        assert not model.objects.exists()
    assert Node.objects.exists()


def test_removing_what_is_not_there_is_no_error() -> None:
    assert apply_text("users: [{username: ada, absent: true}]").lines == []


def test_a_group_can_go_when_its_members_move_in_the_same_file() -> None:
    make_user("ada", group=make_group("physics"))
    apply_text(
        """
        groups: [{name: physics, absent: true}, {name: chemistry}]
        users: [{username: ada, group: chemistry}]
        """
    )
    assert not Group.objects.filter(name="physics").exists()


def test_a_group_in_use_stays_and_the_users_are_named() -> None:
    make_user("ada", group=make_group("physics"))
    assert refusals("groups: [{name: physics, absent: true}]") == [
        "groups[0]: group physics is still used by ada"
    ]


def test_a_key_can_move_to_another_name_in_one_file() -> None:
    make_api_key(make_user("ada"), KEY, name="old")
    apply_text(
        f"api_keys: [{{user: ada, name: new, key: {KEY}}}, {{user: ada, name: old, absent: true}}]"
    )
    assert ApiKey.objects.get().name == "new"


# ---- errors


def test_all_errors_are_reported_with_their_paths_and_nothing_is_applied() -> None:
    before = version()
    errors = refusals(
        """
        groups:
          - {name: physics, scheduler_weight: 1}
          - {name: biology, scheduler_weight: -1, colour: red}
          - {scheduler_weight: 1}
        users:
          - {username: ada, group: nowhere}
          - {username: bob, is_staff: "yes"}
        api_keys:
          - {user: ada, name: laptop, key: short}
          - {user: eve, name: laptop, key: "0123456789012345678901234567890123456789"}
        backends:
          - {name: a, base_url: "ftp://x", max_concurrent: 1.5}
          - {name: b}
        aliases: [{name: small, targets: []}]
        settings: {share_mode: both, shutdown_grace: 5, colour: red}
        shapes: []
        """
    )
    assert sorted(error.split(": ")[0] for error in errors) == [
        "aliases[0].targets",
        "api_keys[0].key",
        "api_keys[1].user",
        "backends[0].base_url",
        "backends[0].max_concurrent",
        "backends[1].base_url",
        "groups[1].colour",
        "groups[1].scheduler_weight",
        "groups[2].name",
        "settings.colour",
        "settings.share_mode",
        "settings.shutdown_grace",
        "shapes",
        "users[0].group",
        "users[1].is_staff",
    ]
    assert "users[0].group: there is no group 'nowhere'" in errors
    assert "users[1].is_staff: must be true or false, not the text 'yes'" in errors
    assert "api_keys[0].key: needs at least 32 characters" in errors
    assert "backends[0].max_concurrent: must be a whole number, not the number 1.5" in errors
    assert (
        "settings.shutdown_grace: can be set in the environment only, as SHUTDOWN_GRACE" in errors
    )
    assert not Group.objects.filter(name="physics").exists()
    assert not User.objects.exists()
    assert version() == before


@pytest.mark.parametrize("weight", [".nan", "-.inf", ".inf", "-0.1", "1000000001", "NaN", "true"])
@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("groups: [{{name: physics, scheduler_weight: {}}}]", "groups[0].scheduler_weight"),
        ("quotas: [{{user: ada, weight_override: {}}}]", "quotas[0].weight_override"),
    ],
)
def test_odd_weights_are_refused(template: str, path: str, weight: str) -> None:
    make_user("ada")
    [error] = refusals(template.format(weight))
    assert error.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("groups: {name: physics}", "groups: must be a list"),
        ("groups: [physics]", "groups[0]: must be a mapping"),
        ("[1, 2]", "file: must be a mapping of sections such as groups and users"),
        ("settings: []", "settings: must be a mapping"),
        (
            "users: [{username: 1234}]",
            "users[0].username: must be a text, not the number 1234; put it in quotes",
        ),
        (
            "users: [{username: no}]",
            "users[0].username: must be a text, not false; put it in quotes",
        ),
        ("users: [{username: ''}]", "users[0].username: must not be empty"),
        ("users: [{username: ada, is_active: null}]", "users[0].is_active: must not be null"),
        ("users: [{username: ada, password: ''}]", "users[0].password: must not be empty"),
        ("users: [{username: ada, absent: 1}]", "users[0].absent: must be true or false, "),
        ("users: [{username: a}, {username: a}]", "users[1]: user a is already in users[0]"),
        ('users: [{username: "a\\0"}]', "users[0].username: must not contain NUL"),
        ('groups: [{name: a, description: "\\ud800"}]', "groups[0].description: must be valid"),
        ("groups: [{name: g, max_queued: -1}]", "groups[0].max_queued: Ensure this value is"),
        ("groups: [{name: g, max_wait: -1}]", "groups[0].max_wait: Ensure this value is"),
        ("groups: [{name: g, budget_period: year}]", "groups[0].budget_period: Value 'year' is"),
        ("groups: [{name: g, allowed_models: m}]", "groups[0].allowed_models: must be a list of"),
        ("groups: [{name: g, scheduler_weight: 0.0000001}]", "groups[0].scheduler_weight: Ensure"),
        (f"groups: [{{name: {'g' * 101}}}]", "groups[0].name: Ensure this value has at most 100"),
        ("quotas: [{user: eve}]", "quotas[0].user: there is no user 'eve'"),
        ("backends: [{name: a, base_url: 'http://169.254.169.254'}]", "backends[0].base_url: Link"),
        ("backends: [{name: a, base_url: 5}]", "backends[0].base_url: must be a text, not the"),
        (
            "backends: [{name: a, base_url: 'http://a', models: [{name: m, vision: maybe}]}]",
            "backends[0].models[0].vision: must be true or false, not the text 'maybe'",
        ),
        (
            "backends: [{name: a, base_url: 'http://a', models: [{name: m, size: 1}]}]",
            "backends[0].models[0].size: unknown; there are by_hand, context_length, embeddings, ",
        ),
        (
            "backends: [{name: a, base_url: 'http://a', models: [{name: m}, {name: m}]}]",
            "backends[0].models[1]: model m is given twice",
        ),
        (
            "backends: [{name: a, base_url: 'http://a', models: [{name: m, vram_mb: -1}]}]",
            "backends[0].models[0].vram_mb: Must be a number from 0 ",
        ),
        ("backends: [{name: a, base_url: 'http://a', node: x}]", "backends[0].node: there is no"),
        ("settings: {quantum: 0}", "settings.quantum: Ensure this value is greater than or equal"),
        ("settings: {deprioritize_threshold: 0.4}", "settings.deprioritize_threshold: Ensure"),
        ("settings: {id: 3}", "settings.id: unknown; there are share_mode, "),
        (
            "settings: {backend_poll_interval: 1}",
            "settings.backend_poll_interval: can be set in the environment only, as BACKEND_POLL",
        ),
        (
            "settings: {weight_staff: 1}",
            "settings.weight_staff: can be set in the environment only, as SCHEDULER_WEIGHT_STAFF",
        ),
    ],
)
def test_one_thing_wrong_is_one_error(text: str, error: str) -> None:
    [line] = refusals(text)
    assert line.startswith(error)


@pytest.mark.parametrize(
    "text", ["groups: [", "a: 1\na: 2", "groups: [{name: a, name: b}]", "!!python/object:os {}"]
)
def test_broken_yaml_and_keys_given_twice_are_refused(text: str) -> None:
    [line] = refusals(text)
    assert line.startswith("file: not YAML: ")


def test_a_key_in_use_elsewhere_and_a_new_key_without_one_are_refused() -> None:
    make_api_key(make_user("ada"), KEY, name="laptop")
    assert refusals(f"api_keys: [{{user: ada, name: b, key: {KEY}}}, {{user: ada, name: c}}]") == [
        "api_keys[0].key: is in use already",
        "api_keys[1].key: is missing: there is no API key ada/c yet",
    ]


# ---- the command


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backends that the command had probed."""
    seen: list[int] = []

    def probe_backends(ids: list[int], *, anew: bool) -> None:
        assert anew  # the address may be another server's now
        seen.extend(ids)

    monkeypatch.setattr(apply, "probe_backends", probe_backends)
    return seen


def command(*arguments: str, **options: object) -> str:
    out = io.StringIO()
    call_command("apply", *arguments, stdout=out, **options)
    return out.getvalue()


def test_the_command_prints_what_it_did_and_probes_new_backends(
    tmp_path: Path, probed: list[int]
) -> None:
    make_backend("a")
    file = tmp_path / "site.yaml"
    file.write_text("backends: [{name: b, base_url: 'http://127.0.0.1:9001'}, {name: a}]")
    assert command(str(file)) == "+ backend b\n"
    assert probed == [Backend.objects.get(name="b").pk]
    assert command(str(file)) == "Nothing to change.\n"
    assert len(probed) == 1


def test_a_dry_run_prints_the_difference_and_changes_nothing(
    tmp_path: Path, probed: list[int]
) -> None:
    make_backend("a", max_concurrent=4)
    file = tmp_path / "site.yaml"
    file.write_text("groups: [{name: physics}]\nbackends: [{name: a, max_concurrent: 8}]\n")
    before = version(), history_rows()
    assert command(str(file), dry_run=True) == (
        "+ group physics\n~ backend a: max_concurrent 4 → 8\n"
    )
    assert (version(), history_rows()) == before
    assert probed == []


def test_the_command_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, probed: list[int]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("groups: [{name: physics}]"))
    assert command("-") == "+ group physics\n"


def test_the_command_fails_when_the_file_is_wrong_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("groups: [{name: physics, scheduler_weight: -1}]")
    with pytest.raises(CommandError, match=r"Nothing was applied.\ngroups\[0\].scheduler_weight: "):
        command(str(file))
    with pytest.raises(CommandError, match="Cannot read"):
        command(str(tmp_path / "missing.yaml"))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommandError, match="Cannot read"):
        command(str(file))
