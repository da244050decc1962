"""The admin's pages on backends, used as a browser uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from accounts.models import User
from backends.admin.showing import age, known
from backends.models import (
    Alias,
    Backend,
    BackendModel,
    BackendStatus,
    ModelStrategy,
    Node,
    NodeStatus,
)
from backends.services import probe_backends
from tests.factories import make_admin, make_backend, make_user
from tests.stubs.engines import llamacpp_stub, openai_stub, vllm_stub

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "admin:backends_backend_changelist"
CHANGE = "admin:backends_backend_change"
ADD = "admin:backends_backend_add"


def browser_of(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="accounts.authentication.RoleBackend")
    return client


@pytest.fixture
def browser() -> Client:
    return browser_of(make_admin())


def make_auditor() -> User:
    return make_user(is_staff=True, role="auditor")


def form_of(page: Any) -> dict[str, Any]:
    """What a browser would send back from ``page`` unchanged."""
    data: dict[str, Any] = {}
    form = page.context["adminform"].form
    formsets = [inline.formset for inline in page.context["inline_admin_formsets"]]
    for one in [form, *(f.management_form for f in formsets), *(x for f in formsets for x in f)]:
        for field in one:
            value = field.value()
            if value is not None and value is not False:  # not a 0
                data[field.html_name] = value
    return data


def messages_of(response: Any) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]


def save(browser: Client, backend: Backend, **changed: Any) -> Any:
    address = reverse(CHANGE, args=[backend.pk])
    data = form_of(browser.get(address)) | changed
    return browser.post(address, {k: v for k, v in data.items() if v is not None})


def test_a_saved_backend_is_probed_at_once_and_the_page_says_what_was_found(
    browser: Client,
) -> None:
    with vllm_stub("a", "b") as stub:
        data = form_of(browser.get(reverse(ADD))) | {"name": "gpu", "base_url": stub.url + "/v1"}
        response = browser.post(reverse(ADD), data)
    assert response.status_code == 302
    backend = Backend.objects.get(name="gpu")
    assert [row.name for row in backend.models.all()] == ["a", "b"]
    assert "gpu: vLLM 0.32.0, models: 2." in messages_of(response)


def test_a_backend_that_does_not_answer_is_saved_all_the_same(browser: Client) -> None:
    data = form_of(browser.get(reverse(ADD)))
    response = browser.post(reverse(ADD), data | {"name": "x", "base_url": "http://127.0.0.1:9"})
    assert Backend.objects.get(name="x").state == "down"
    assert any(message.startswith("x: down. GET /v1/models") for message in messages_of(response))


def test_more_concurrency_than_slots_is_warned_about(browser: Client) -> None:
    with llamacpp_stub() as stub:
        backend = make_backend("small", base_url=stub.url, max_concurrent=2)
        assert not any("at once" in message for message in messages_of(save(browser, backend)))
        response = save(browser, backend, max_concurrent=3)
    assert any(
        message.startswith("small is sent up to 3 requests at once but says that it runs 2")
        for message in messages_of(response)
    )


def test_a_refused_address_comes_back_with_the_reason(browser: Client) -> None:
    backend = make_backend()
    response = save(browser, backend, base_url="http://169.254.169.254")
    assert response.status_code == 200
    assert "Link-local" in response.content.decode()


# ---- keys


def test_the_key_is_never_shown_and_an_empty_field_keeps_it(browser: Client) -> None:
    with openai_stub() as stub:
        backend = make_backend(base_url=stub.url, api_key="sk-secret")
        page = browser.get(reverse(CHANGE, args=[backend.pk])).content.decode()
        assert "sk-secret" not in page
        assert re.search(r'<input[^>]*type="password"[^>]*name="api_key"', page)
        save(browser, backend, priority="2")
        assert {asked.headers.get("authorization") for asked in stub.asked} == {"Bearer sk-secret"}
    backend.refresh_from_db()
    assert (backend.api_key, backend.priority) == ("sk-secret", 2.0)


def test_a_typed_key_replaces_the_stored_one_and_a_tick_removes_it(browser: Client) -> None:
    backend = make_backend(api_key="old", base_url="http://127.0.0.1:9")
    save(browser, backend, api_key="new")
    backend.refresh_from_db()
    assert backend.api_key == "new"
    save(browser, backend, remove_key="on")
    backend.refresh_from_db()
    assert backend.api_key is None


def test_a_key_that_would_break_out_of_its_header_is_refused(browser: Client) -> None:
    backend = make_backend()
    response = save(browser, backend, api_key="a b")
    assert response.status_code == 200
    assert "printable ASCII" in response.content.decode()


@pytest.mark.parametrize("make", [make_admin, make_auditor])
def test_no_page_shows_a_key_to_anybody(make: Callable[[], User]) -> None:
    client = browser_of(make())
    backend = make_backend(api_key="sk-secret")
    backend.priority = 3
    backend.save()
    node = Node.objects.create(
        name="n", telemetry_url="http://n/metrics", telemetry_key="sk-secret"
    )
    history = backend.history.first()
    pages = [
        reverse(LIST),
        reverse(CHANGE, args=[backend.pk]),
        reverse("admin:backends_backend_history", args=[backend.pk]),
        reverse("admin:backends_backend_simple_history", args=[backend.pk, history.pk]),
        reverse("admin:backends_node_changelist"),
        reverse("admin:backends_node_change", args=[node.pk]),
        reverse("admin:backends_node_history", args=[node.pk]),
    ]
    for page in pages:
        response = client.get(page)
        assert response.status_code == 200, page
        assert "sk-secret" not in response.content.decode(), page


# ---- models


def test_each_value_of_a_model_can_be_set_or_left_as_detected(browser: Client) -> None:
    with llamacpp_stub("m") as stub:
        backend = make_backend(base_url=stub.url)
        probe_backends([backend.pk])
        page = browser.get(reverse(CHANGE, args=[backend.pk]))
        assert "auto: no" in page.content.decode()
        row = BackendModel.objects.get(name="m")
        save(browser, backend, **{"models-0-vision": "True", "models-0-context_length": "1000"})
        row.refresh_from_db()
        assert (row.vision, row.tools, row.context_length) == (True, None, 1000)
        save(browser, backend, **{"models-0-vision": "", "models-0-tools": "False"})
    row.refresh_from_db()
    assert (row.vision, row.tools, row.by_hand) == (None, False, False)


def test_a_model_added_by_hand_is_kept(browser: Client) -> None:
    with openai_stub("m") as stub:
        backend = make_backend(base_url=stub.url)
        new = {"models-TOTAL_FORMS": "1", "models-0-name": "extra", "models-0-by_hand": "on"}
        save(browser, backend, **new)
    assert {(row.name, row.by_hand, row.listed) for row in backend.models.all()} == {
        ("extra", True, False),
        ("m", False, True),
    }


def test_a_backend_of_hundreds_of_models_can_be_saved(browser: Client) -> None:
    backend = make_backend(base_url="http://127.0.0.1:9", models=tuple(f"m{n}" for n in range(300)))
    assert save(browser, backend, priority="1").status_code == 302
    assert backend.models.count() == 300


# ---- the list


def test_the_list_takes_the_same_queries_for_one_backend_and_for_thirty(
    browser: Client, django_assert_num_queries: Any
) -> None:
    node = Node.objects.create(name="n")

    def add(number: int) -> None:
        for _ in range(number):
            backend = make_backend(models=("a", "b"), node=node)
            BackendStatus.objects.create(backend=backend, attempted_at=timezone.now())

    add(1)
    browser.get(reverse(LIST))  # what is read once only: content types and the like
    with django_assert_num_queries(QUERIES_OF_THE_LIST):
        browser.get(reverse(LIST))
    add(29)
    with django_assert_num_queries(QUERIES_OF_THE_LIST):
        page = browser.get(reverse(LIST))
    assert page.content.decode().count("not found out yet") == 30


#: session, user, polls stopped?, all paused?, two counts, the page, and the nodes of the filter
QUERIES_OF_THE_LIST = 8


def test_the_list_shows_state_and_age_and_dashes_for_what_is_unknown(browser: Client) -> None:
    with vllm_stub() as stub:
        backend = make_backend("gpu", base_url=stub.url)
        probe_backends([backend.pk])
    rows = browser.get(reverse(LIST)).content.decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", rows))
    assert re.search(r"gpu ready \d s ago vLLM 0\.32\.0 1 2 / 3 16 –", text)


def test_polls_that_have_stopped_are_noticed(browser: Client) -> None:
    backend = make_backend()
    status = BackendStatus.objects.create(backend=backend, attempted_at=timezone.now())
    assert "seems not to run" not in browser.get(reverse(LIST)).content.decode()
    status.attempted_at = timezone.now() - timedelta(seconds=61)
    status.save()
    assert "seems not to run" in browser.get(reverse(LIST)).content.decode()


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("enable", {"enabled": False}, {"enabled": True}),
        ("disable", {"enabled": True}, {"enabled": False}),
        ("drain", {"draining": False}, {"draining": True}),
        ("resume", {"draining": True}, {"draining": False}),
    ],
)
def test_an_action_changes_the_chosen_backends_and_their_history(
    browser: Client, action: str, before: dict[str, bool], after: dict[str, bool]
) -> None:
    chosen, other = make_backend(**before), make_backend(**before)
    browser.post(reverse(LIST), {"action": action, "_selected_action": [chosen.pk]})
    [field] = after
    chosen.refresh_from_db()
    other.refresh_from_db()
    assert (getattr(chosen, field), getattr(other, field)) == (after[field], before[field])
    assert [getattr(h, field) for h in chosen.history.all()] == [after[field], before[field]]


def test_poll_now_polls_now(browser: Client) -> None:
    with openai_stub("m") as stub:
        backend = make_backend("x", base_url=stub.url)
        data = {"action": "poll_now", "_selected_action": [backend.pk]}
        response = browser.post(reverse(LIST), data)
    assert "x: OpenAI-compatible, models: 1." in messages_of(response)


def test_who_may_only_look_is_offered_no_changes() -> None:
    client = browser_of(make_auditor())
    backend = make_backend()
    data = {"action": "disable", "_selected_action": [backend.pk]}
    client.post(reverse(LIST), data)
    backend.refresh_from_db()
    assert backend.enabled


@pytest.mark.parametrize(
    ("fields", "reachable", "state"),
    [
        ({}, True, "ready"),
        ({}, False, "down"),
        ({}, None, "no answer"),
        ({"draining": True}, True, "draining"),
        ({"draining": True}, False, "down"),
        ({"enabled": False}, True, "disabled"),
    ],
)
def test_the_state_is_what_matters_most(
    fields: dict[str, bool], reachable: bool | None, state: str
) -> None:
    backend = make_backend(**fields)
    assert backend.state in ("not polled yet", "disabled")
    BackendStatus.objects.create(backend=backend, answered_at=timezone.now(), reachable=reachable)
    assert Backend.objects.get(pk=backend.pk).state == state


# ---- nodes, aliases, strategies


def test_a_node_shows_its_memory_and_keeps_its_key(browser: Client) -> None:
    node = Node.objects.create(name="n", telemetry_url="http://gpu-1/metrics", telemetry_key="sk-1")
    gpus = [{"index": "0", "memory_total_mib": 40960.0, "memory_free_mib": 1024.0}]
    NodeStatus.objects.create(node=node, gpus=gpus, observed_at=timezone.now())
    page = browser.get(reverse("admin:backends_node_changelist")).content.decode()
    assert "1,024 MiB of 40,960 MiB" in page
    address = reverse("admin:backends_node_change", args=[node.pk])
    data = form_of(browser.get(address)) | {"name": "renamed"}
    assert browser.post(address, data).status_code == 302
    node.refresh_from_db()
    assert (node.name, node.telemetry_key) == ("renamed", "sk-1")


def test_an_alias_is_a_list_of_names_one_a_line(browser: Client) -> None:
    address = reverse("admin:backends_alias_add")
    assert browser.post(address, {"name": "small", "targets": "\n \n"}).status_code == 200
    data = {"name": "small", "targets": "smollm2\r\n qwen3 \n\nsmollm2"}
    assert browser.post(address, data).status_code == 302
    alias = Alias.objects.get(name="small")
    assert alias.targets == ["smollm2", "qwen3"]
    page = browser.get(reverse("admin:backends_alias_change", args=[alias.pk])).content.decode()
    assert "smollm2\nqwen3" in page


def test_a_models_strategy_can_be_chosen(browser: Client) -> None:
    data = {"model_name": "m", "strategy": "affinity"}
    browser.post(reverse("admin:backends_modelstrategy_add"), data)
    assert str(ModelStrategy.objects.get()) == "m: affinity"


# ---- texts


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "MiB", "–"),
        ("", "", "–"),
        (0, "", "0"),
        (0.0, "%", "0 %"),
        (1536.4, "MiB", "1,536 MiB"),
    ],
)
def test_unknown_is_a_dash_and_zero_is_zero(value: Any, unit: str, text: str) -> None:
    assert known(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s ago"), (90, "90 s ago"), (600, "10 min ago"), (1e6, "12 d ago")]
)
def test_an_age_is_told_in_its_largest_fitting_unit(seconds: float, text: str) -> None:
    assert age(timezone.now() - timedelta(seconds=seconds)) == text
    assert age(None) == "never"
