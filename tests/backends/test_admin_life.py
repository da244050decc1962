"""What an admin does to backends, models, aliases and nodes, as a browser does it."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

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
from scheduler.core.jobs import CAPABILITIES
from tests.backends.test_admin import browser_of, form_of, make_auditor, messages_of, save
from tests.factories import make_admin, make_backend, make_user
from tests.stubs.engines import Answer, OllamaModel, ollama_stub, openai_stub, vllm_stub

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "admin:backends_backend_changelist"
CHANGE = "admin:backends_backend_change"
CHAT = "POST /v1/chat/completions"
HELLO = Answer({"choices": [{"message": {"content": "Hello <b>there</b>"}}]})
GPUS = [
    {
        "index": "0",
        "name": "NVIDIA A100",
        "memory_total_mib": 40960.0,
        "memory_used_mib": 1024.0,
        "memory_free_mib": 39936.0,
        "utilization": 0.5,
        "temperature_celsius": 41.0,
        "power_watts": 61.5,
    },
    {"index": "1"},
]


@pytest.fixture
def browser() -> Client:
    return browser_of(make_admin())


def plain(response: Any) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", response.content.decode()))


def act(browser: Client, backend: Backend, action: str) -> Any:
    response = browser.post(
        reverse("admin:backends_backend_act", args=[backend.pk]), {"action": action}
    )
    if Backend.objects.filter(pk=backend.pk).exists():
        backend.refresh_from_db()
    return response


def chosen(browser: Client, action: str, *rows: Any, model: str = "backend") -> Any:
    address = reverse(f"admin:backends_{model}_changelist")
    return browser.post(address, {"action": action, "_selected_action": [row.pk for row in rows]})


# ---- in and out of service


def test_each_button_of_a_backends_page_acts_on_it(browser: Client) -> None:
    backend, other = make_backend("a"), make_backend("b")
    page = browser.get(reverse(CHANGE, args=[backend.pk])).content.decode()
    assert set(re.findall(r'name="action"\s+value="(\w+)"', page)) >= {
        "enable", "disable", "drain", "pause", "resume", "poll_now", "detect",
    }  # fmt: skip
    expected = {
        "pause": (True, False, True),
        "drain": (True, True, True),
        "resume": (True, False, False),
        "disable": (False, False, False),
        "enable": (True, False, False),
    }
    for action, state in expected.items():
        response = act(browser, backend, action)
        assert response.url == reverse(CHANGE, args=[backend.pk])
        assert (backend.enabled, backend.draining, backend.paused) == state, action
        newest = backend.history.first()
        assert (newest.history_change_reason, newest.enabled) == (action, state[0])
        assert newest.history_user is not None
    other.refresh_from_db()
    assert other.history.count() == 1


def test_an_action_that_changes_nothing_leaves_no_history(browser: Client) -> None:
    backend = make_backend()
    response = act(browser, backend, "enable")
    assert messages_of(response) == ["Enable: all were so already."]
    assert backend.history.count() == 1


def test_what_is_disabled_is_not_drained(browser: Client) -> None:
    backend = make_backend(enabled=False)
    act(browser, backend, "drain")
    assert not backend.draining


def test_enabling_ends_a_drain_that_was_under_way_when_it_was_disabled(browser: Client) -> None:
    backend = make_backend(enabled=False, draining=True)
    act(browser, backend, "enable")
    assert (backend.enabled, backend.draining) == (True, False)


def test_resuming_what_is_disabled_says_that_it_stays_so(browser: Client) -> None:
    backend = make_backend("x", enabled=False, paused=True)
    response = act(browser, backend, "resume")
    assert (backend.enabled, backend.paused) == (False, False)
    assert "Disabled, and so it stays until it is enabled: x." in messages_of(response)


def test_all_backends_are_paused_and_resumed_and_nothing_else_about_them_changes(
    browser: Client,
) -> None:
    off, drained, plain_one = (
        make_backend(enabled=False),
        make_backend(draining=True),
        make_backend(),
    )
    address = reverse("admin:backends_backend_all")
    page = browser.get(reverse(LIST)).content.decode()
    assert address in page
    browser.post(address, {"action": "pause"})
    states = Backend.objects.values_list("enabled", "draining", "paused").order_by("pk")
    assert list(states.all()) == [(False, False, True), (True, True, True), (True, False, True)]
    response = browser.post(address, {"action": "resume"})
    assert messages_of(response)[-1] == "Resumed: 3 backends."
    assert list(states.all()) == [(False, False, False), (True, True, False), (True, False, False)]
    for backend in (off, drained, plain_one):
        reasons = backend.history.values_list("history_change_reason", flat=True)
        assert list(reasons) == ["resume all", "pause all", None]


def test_only_who_may_change_backends_acts_on_them_and_only_by_post() -> None:
    backend = make_backend()
    auditor, operator = (
        browser_of(make_auditor()),
        browser_of(make_user(is_staff=True, role="operator")),
    )
    everything = reverse("admin:backends_backend_all")
    test = reverse("admin:backends_backend_test", args=[backend.pk])
    assert act(auditor, backend, "disable").status_code == 403
    assert auditor.post(everything, {"action": "pause"}).status_code == 403
    assert auditor.get(test).status_code == 403
    page = auditor.get(reverse(CHANGE, args=[backend.pk])).content.decode()
    assert re.findall(r'name="action"\s+value="(\w+)"', page) == ["poll_now"]
    assert everything not in auditor.get(reverse(LIST)).content.decode()
    assert operator.get(everything).status_code == 405
    assert operator.post(everything, {"action": "delete"}).status_code == 404
    assert act(operator, backend, "delete_selected").status_code == 404
    assert act(operator, Backend(pk=987654), "pause").status_code == 404
    assert act(operator, backend, "pause").status_code == 302
    assert backend.paused


# ---- asking a server


def test_the_engine_is_detected_anew(browser: Client) -> None:
    with openai_stub("m") as stub:
        backend = make_backend("x", base_url=stub.url)
        probe_backends([backend.pk])
        stub.answers |= vllm_stub("m").answers
        response = act(browser, backend, "detect")
        assert messages_of(response) == ["x: vLLM 0.32.0, models: 1."]
        backend.engine = "ollama"
        backend.save()
        response = act(browser, backend, "detect")
        assert messages_of(response)[-1] == "x: found vLLM, but Ollama is chosen."
    response = act(browser, backend, "detect")
    assert messages_of(response)[-1] == "x: nothing was found out; Ollama is chosen."
    assert backend.engine == "ollama"


def test_a_backend_is_tested_from_its_page(browser: Client) -> None:
    with openai_stub("m") as stub:
        stub.answers[CHAT] = HELLO
        backend = make_backend("x", base_url=stub.url, models=("m",))
        address = reverse("admin:backends_backend_test", args=[backend.pk])
        assert address in browser.get(reverse(CHANGE, args=[backend.pk])).content.decode()
        assert stub.asked == []
        assert "Send" in plain(browser.get(address))
        answered = browser.post(address, {"model": "m", "prompt": "Hi"})
        assert stub.count("/v1/chat/completions") == 1
        refused = browser.post(address, {"model": "other", "prompt": "Hi"})
        stub.answers[CHAT] = Answer({"error": {"message": "boom"}}, 500)
        failed = browser.post(address, {"model": "m", "prompt": "Hi"})
    assert "Hello &lt;b&gt;there&lt;/b&gt;" in answered.content.decode()
    assert re.search(r"answered after \d+\.\d\d s", plain(answered))
    assert "Select a valid choice" in plain(refused)
    assert re.search(r"failed after .* Status 500 boom", plain(failed))


def test_a_backend_without_models_cannot_be_tested(browser: Client) -> None:
    address = reverse("admin:backends_backend_test", args=[make_backend().pk])
    assert "It offers no model" in plain(browser.get(address))
    assert "It offers no model" in plain(browser.post(address, {"model": "", "prompt": "Hi"}))


def test_several_backends_are_tested_from_the_list(browser: Client) -> None:
    with openai_stub("m") as stub:
        stub.answers[CHAT] = HELLO
        good = make_backend("a", base_url=stub.url, models=("m",))
        response = chosen(browser, "test", good, make_backend("b"))
    first, second = messages_of(response)
    assert re.fullmatch(r"a, m, \d+\.\d s: Hello <b>there</b>", first)
    assert re.fullmatch(r"b, no model, 0\.0 s: It offers no model\.", second)


def test_models_of_ollama_are_loaded_and_unloaded_from_their_list(browser: Client) -> None:
    with ollama_stub(OllamaModel("m:latest", size_vram=1024 * 1024)) as stub:
        stub.answers["POST /api/generate"] = Answer({"done": True})
        backend = make_backend("o", base_url=stub.url)
        probe_backends([backend.pk])
        other = make_backend("v", engine="vllm", models=("m",))
        rows = [backend.models.get(), other.models.get()]
        page = plain(browser.get(reverse("admin:backends_backendmodel_changelist")))
        assert re.search(r"yes, 1 MiB \(\d s ago\)", page)
        response = chosen(browser, "unload", *rows, model="backendmodel")
        assert messages_of(response) == [
            "m on v: only Ollama loads and unloads models when it is told to.",
            "m:latest on o is out of memory.",
        ]
        stub.answers["POST /api/generate"] = Answer({"error": "no room"}, 500)
        response = chosen(browser, "load", rows[0], model="backendmodel")
        assert messages_of(response)[-1] == "m:latest on o: no room"


# ---- GPUs


def test_a_node_shows_its_gpus_with_their_age_and_links_to_its_backends(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)
    node = Node.objects.create(name="n", telemetry_url="http://gpu-1/metrics")
    status = NodeStatus.objects.create(node=node, gpus=GPUS, observed_at=now)
    backend = make_backend("a", node=node, gpu_indexes=[0])
    make_backend("b", node=node)
    address = reverse("admin:backends_node_change", args=[node.pk])
    page = browser.get(address)
    assert "0 NVIDIA A100 1,024 MiB 39,936 MiB 40,960 MiB 50 % 41 °C 62 W" in plain(page)
    assert "1 – – – – – –" in plain(page)
    assert reverse(CHANGE, args=[backend.pk]) in page.content.decode()
    assert "a (GPU 0), b (all GPUs)" in plain(page).replace(" ,", ",")
    assert re.search(r"answers .* 0 s ago", plain(page))
    status.observed_at = now - timedelta(seconds=90)
    status.save()
    assert "90 s ago: too old to count, taken as unknown" in plain(browser.get(address))
    status.error = "no answer within 4 s"
    status.save()
    assert "no answer" in plain(browser.get(reverse("admin:backends_node_changelist")))


def test_a_backend_shows_its_own_gpus_and_links_to_its_node_and_decisions(
    browser: Client,
) -> None:
    node = Node.objects.create(name="node-1", telemetry_url="http://gpu-1/metrics")
    NodeStatus.objects.create(node=node, gpus=GPUS, observed_at=timezone.now())
    backend = make_backend("a b", node=node, gpu_indexes=[0])
    page = browser.get(reverse(CHANGE, args=[backend.pk]))
    assert "0 NVIDIA A100" in plain(page)
    assert "1 – – – – – –" not in plain(page)
    html = page.content.decode()
    assert reverse("admin:backends_node_change", args=[node.pk]) in html
    assert "selected_backend=a%20b" in html
    assert "selected_backend=a+b" in browser.get(reverse(LIST)).content.decode()


def test_gpus_are_given_as_numbers_with_commas(browser: Client) -> None:
    node = Node.objects.create(name="n")
    NodeStatus.objects.create(node=node, gpus=GPUS, observed_at=timezone.now())
    backend = make_backend("x", base_url="http://127.0.0.1:9", node=node)
    response = save(browser, backend, gpu_indexes="0, 7")
    backend.refresh_from_db()
    assert backend.gpu_indexes == [0, 7]
    assert any(m.startswith("n tells of no GPU 7; it has 0, 1.") for m in messages_of(response))
    page = browser.get(reverse(CHANGE, args=[backend.pk]))
    assert form_of(page)["gpu_indexes"] == "0, 7"
    assert re.search(r'name="gpu_indexes" value="0, 7"', page.content.decode())
    save(browser, backend, gpu_indexes="")
    backend.refresh_from_db()
    assert backend.gpu_indexes is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "whole numbers"),
        ("-1", "whole numbers"),
        ("0, 0", "once only"),
        ("999", "from 0 to 255"),
    ],
)
def test_refused_gpus_say_why(browser: Client, text: str, why: str) -> None:
    response = save(browser, make_backend(), gpu_indexes=text)
    assert response.status_code == 200
    (error,) = response.context["adminform"].form.errors["gpu_indexes"]
    assert why in error


def test_gpus_without_a_node_are_warned_about(browser: Client) -> None:
    backend = make_backend("x", base_url="http://127.0.0.1:9")
    response = save(browser, backend, gpu_indexes="0")
    assert "x is given GPUs, but no node that they are on." in messages_of(response)


# ---- aliases and strategies


def test_the_list_of_aliases_shows_which_target_is_used_and_which_are_dead(
    browser: Client, django_assert_num_queries: Any
) -> None:
    make_backend("a", models=("first", "second"))
    make_backend("b", models=("second",))
    make_backend("off", models=("asleep",), enabled=False)
    Alias.objects.create(name="small", targets=["gone", "asleep", "second", "first"])
    address = reverse("admin:backends_alias_changelist")
    browser.get(address)
    with django_assert_num_queries(QUERIES_OF_THE_ALIASES):
        page = plain(browser.get(address))
    assert (
        "dead gone no backend has it dead asleep only on off, out of service "
        "used now second on a, b first on a"
    ) in page
    for number in range(20):
        Alias.objects.create(name=f"x{number}", targets=["first"])
    with django_assert_num_queries(QUERIES_OF_THE_ALIASES):
        browser.get(address)


#: session, user, two counts, the page, backends and their models
QUERIES_OF_THE_ALIASES = 7


def test_an_alias_without_a_live_target_is_warned_about_and_saved(browser: Client) -> None:
    Alias.objects.create(name="other", targets=["m"])
    data = {"name": "small", "targets": "nowhere\nother"}
    response = browser.post(reverse("admin:backends_alias_add"), data)
    alias = Alias.objects.get(name="small")
    assert alias.targets == ["nowhere", "other"]
    warnings = messages_of(response)
    assert any(text.startswith("No backend in service has a target of small") for text in warnings)
    assert any(text.startswith("other is an alias itself") for text in warnings)
    page = plain(browser.get(reverse("admin:backends_alias_change", args=[alias.pk])))
    assert "dead nowhere no backend has it" in page


def test_a_strategy_shows_the_backends_that_it_is_for(browser: Client) -> None:
    make_backend("a", models=("m",))
    ModelStrategy.objects.create(model_name="m", strategy="affinity")
    ModelStrategy.objects.create(model_name="gone", strategy="score")
    page = plain(browser.get(reverse("admin:backends_modelstrategy_changelist")))
    assert "on a" in page
    assert "no backend has it" in page


# ---- models


def test_the_list_of_models_takes_the_same_queries_for_any_number(
    browser: Client, django_assert_num_queries: Any
) -> None:
    address = reverse("admin:backends_backendmodel_changelist")

    def add(number: int) -> None:
        for _ in range(number):
            backend = make_backend(models=("a", "b"))
            BackendStatus.objects.create(backend=backend, observed_at=timezone.now())

    add(1)
    browser.get(address)
    with django_assert_num_queries(QUERIES_OF_THE_MODELS):
        browser.get(address)
    add(15)
    with django_assert_num_queries(QUERIES_OF_THE_MODELS):
        browser.get(address)


#: session, user, two counts, the page, and the backends of the filter
QUERIES_OF_THE_MODELS = 6


def test_the_list_of_models_tells_what_each_can_do(browser: Client) -> None:
    backend = make_backend("a")
    BackendModel.objects.create(
        backend=backend,
        name="m",
        listed=True,
        tools=True,
        detected_vision=False,
        detected_json=True,
        detected_context_length=4096,
        vram_mib=2048.0,
    )
    page = plain(browser.get(reverse("admin:backends_backendmodel_changelist")))
    assert "m a listed by the backend – 2,048 MiB 4,096 tokens tools, JSON, embeddings ?" in page


def test_a_model_is_edited_on_a_page_of_its_own(browser: Client) -> None:
    row = make_backend(models=("m",)).models.get()
    address = reverse("admin:backends_backendmodel_change", args=[row.pk])
    page = browser.get(address)
    assert page.content.decode().count("auto: ?") == len(CAPABILITIES)
    data = form_of(page) | {"vision": "True", "context_length": "1000", "speech": "True"}
    assert browser.post(address, data | {"images": "False"}).status_code == 302
    row.refresh_from_db()
    assert (row.vision, row.context_length, row.backend_id) == (True, 1000, row.backend_id)
    assert (row.speech, row.images, row.rerank) == (True, False, None)
    listed = plain(browser.get(reverse("admin:backends_backendmodel_changelist")))
    assert "speech" in listed
    assert "rerank" not in listed
