"""Polls from claim to database: who polls, what is kept, what is left alone."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.utils import timezone

from backends import probe as probing
from backends import services
from backends.claims import (
    CLAIM_SECONDS,
    claim,
    claim_due,
    claim_due_nodes,
    fingerprint,
    release,
    with_status,
)
from backends.engines.gpu import Gpu
from backends.engines.observation import ModelInfo, Observation
from backends.keeping import save_node, save_observation
from backends.models import Backend, BackendModel, BackendStatus, Node, NodeStatus
from backends.probe import ProbeResult, Target
from backends.services import detect, poll_due, probe_backends
from scheduler.snapshot import configuration_version
from tests.factories import make_backend
from tests.stubs.engines import (
    Answer,
    OllamaModel,
    llamacpp_stub,
    node_stub,
    ollama_stub,
    openai_stub,
    vllm_stub,
)

pytestmark = pytest.mark.django_db


def later(seconds: float, moment: datetime | None = None) -> datetime:
    return (moment or timezone.now()) + timedelta(seconds=seconds)


def claimed(backend: Backend, moment: datetime | None = None) -> Backend:
    """A fresh copy of ``backend``, claimed for a poll that begins at ``moment``."""
    [copy] = with_status(Backend.objects.filter(pk=backend.pk))
    assert claim(copy, moment or timezone.now())
    return copy


def good(*models: ModelInfo | str, engine: str = "vllm", **told: Any) -> ProbeResult:
    infos = tuple(ModelInfo(name=m) if isinstance(m, str) else m for m in models)
    return ProbeResult(reachable=True, engine=engine, observation=Observation(models=infos, **told))


def saved(backend: Backend, result: ProbeResult, moment: datetime | None = None) -> bool:
    """Poll ``backend`` with this outcome."""
    copy = claimed(backend, moment)
    outcome = save_observation(copy, result)
    release(copy)
    return outcome


def names(backend: Backend) -> list[str]:
    return [row.name for row in backend.models.all() if row.by_hand or row.listed]


def status_of(backend: Backend) -> BackendStatus:
    return BackendStatus.objects.get(backend=backend)


# ---- who is due


def test_a_new_backend_is_due_and_then_not_before_its_interval_is_over() -> None:
    backend = make_backend(poll_interval=5)
    now = timezone.now()
    [due] = claim_due(now)
    assert due == backend
    release(due)
    assert claim_due(later(4.4, now)) == []
    assert claim_due(later(4.5, now)) == [backend]  # within half a tick


def test_disabled_backends_are_not_polled_and_draining_ones_are() -> None:
    make_backend(enabled=False)
    draining = make_backend(draining=True)
    assert claim_due(timezone.now()) == [draining]


@pytest.mark.parametrize(
    "change",
    [{"base_url": "http://127.0.0.1:9/v1"}, {"engine": "ollama"}, {"api_key": "new"}],
)
def test_a_changed_backend_is_due_at_once_however_it_was_changed(change: dict[str, str]) -> None:
    backend = make_backend()
    now = timezone.now()
    claim_due(now)
    Backend.objects.filter(pk=backend.pk).update(**change)
    assert claim_due(later(0.1, now)) == [backend]
    assert claim_due(later(0.2, now)) == []


def test_other_changes_do_not_hurry() -> None:
    backend = make_backend()
    now = timezone.now()
    claim_due(now)
    Backend.objects.filter(pk=backend.pk).update(max_concurrent=99, draining=True)
    assert claim_due(later(1, now)) == []


def test_of_two_that_found_a_backend_due_one_polls_it() -> None:
    make_backend()
    now = timezone.now()
    [first] = with_status(Backend.objects.all())
    [second] = with_status(Backend.objects.all())
    assert claim(first, now)
    assert not claim(second, now)


def test_a_poll_that_came_and_went_meanwhile_was_that_poll() -> None:
    make_backend()
    now = timezone.now()
    [first] = with_status(Backend.objects.all())
    [second] = with_status(Backend.objects.all())
    claim(first, now)
    release(first)
    assert not claim(second, later(0.01, now))


def test_a_claim_whose_holder_died_expires() -> None:
    backend = make_backend(poll_interval=1)
    now = timezone.now()
    claim_due(now)
    assert claim_due(later(CLAIM_SECONDS - 1, now)) == []
    assert claim_due(later(CLAIM_SECONDS, now)) == [backend]


def test_giving_back_an_expired_claim_leaves_the_next_ones_alone() -> None:
    backend = make_backend()
    now = timezone.now()
    slow = claimed(backend, now)
    claimed(backend, later(CLAIM_SECONDS, now))
    release(slow)
    assert status_of(backend).claimed_until == later(2 * CLAIM_SECONDS, now)


def test_a_clock_that_was_set_back_stops_no_polls() -> None:
    backend = make_backend(poll_interval=5)
    now = timezone.now()
    claim_due(later(3600, now))
    assert claim_due(now) == [backend]


def test_looking_for_due_backends_takes_a_fixed_number_of_queries(
    django_assert_num_queries: Any,
) -> None:
    for _ in range(30):
        make_backend()
    now = timezone.now()
    claim_due(now)
    with django_assert_num_queries(2):
        claim_due(now)


def test_the_fingerprint_tells_nothing_of_the_key() -> None:
    backend = make_backend(api_key="sk-secret")
    assert "secret" not in fingerprint(backend)
    assert len(fingerprint(backend)) <= 64


# ---- what is kept


def test_a_good_poll_is_kept_with_the_time_it_began() -> None:
    backend = make_backend()
    now = timezone.now()
    result = good("m", running=2, waiting=3, slots=4, kv_use=0.5, version="1", loaded={"m": 512.0})
    assert saved(backend, result, now)
    status = status_of(backend)
    assert (status.observed_at, status.answered_at, status.reachable) == (now, now, True)
    assert (status.running, status.waiting, status.slots, status.kv_use) == (2, 3, 4, 0.5)
    assert (status.detected_engine, status.version) == ("vllm", "1")
    assert status.loaded_models == {"m": 512.0}
    assert names(backend) == ["m"]


def test_a_failed_poll_keeps_the_last_models_and_numbers_with_their_age() -> None:
    backend = make_backend()
    now = timezone.now()
    saved(backend, good("m", running=2), now)
    failed = ProbeResult(reachable=None, error="no answer")
    for number in range(1, 6):
        saved(backend, failed, later(5 * number, now))
    status = status_of(backend)
    assert (status.reachable, status.error, status.running) == (None, "no answer", 2)
    assert (status.observed_at, status.answered_at) == (now, later(25, now))
    assert (status.detected_engine, names(backend)) == ("vllm", ["m"])


def test_an_older_answer_never_overwrites_a_newer_one() -> None:
    backend = make_backend()
    now = timezone.now()
    slow = claimed(backend, now)
    fast = claimed(backend, later(CLAIM_SECONDS, now))
    assert save_observation(fast, good("new", running=1))
    assert not save_observation(slow, good("old", running=9))
    assert (status_of(backend).running, names(backend)) == (1, ["new"])


def test_an_older_failure_never_overwrites_a_newer_answer() -> None:
    backend = make_backend()
    now = timezone.now()
    slow = claimed(backend, now)
    fast = claimed(backend, later(CLAIM_SECONDS, now))
    save_observation(fast, good("m"))
    assert not save_observation(slow, ProbeResult(reachable=False, error="refused"))
    assert status_of(backend).reachable is True


def test_an_answer_of_the_former_address_is_turned_down() -> None:
    backend = make_backend()
    before = claimed(backend)
    Backend.objects.filter(pk=backend.pk).update(base_url="http://127.0.0.1:9")
    claimed(backend)
    assert not save_observation(before, good("old"))
    assert (status_of(backend).reachable, names(backend)) == (None, [])


def test_a_changed_address_forgets_the_numbers_and_its_first_good_poll_the_models() -> None:
    backend = make_backend()
    saved(backend, good("a", "b", running=2))
    Backend.objects.filter(pk=backend.pk).update(base_url="http://127.0.0.1:9")
    saved(backend, ProbeResult(reachable=None, error="slow"))
    assert (status_of(backend).running, names(backend)) == (None, ["a", "b"])
    saved(backend, good("b", "c"))
    assert names(backend) == ["b", "c"]


def test_a_new_key_interrupts_nobody() -> None:
    backend = make_backend()
    saved(backend, good("m"))
    Backend.objects.filter(pk=backend.pk).update(api_key="new")
    claimed(backend)
    assert names(backend) == ["m"]


def test_an_engine_found_before_the_models_could_be_read_is_kept() -> None:
    backend = make_backend()
    saved(backend, ProbeResult(reachable=None, error="401", engine="llamacpp"))
    assert status_of(backend).detected_engine == "llamacpp"


# ---- models


def test_a_model_goes_after_three_good_polls_without_it() -> None:
    backend = make_backend()
    saved(backend, good("a", "b"))
    for expected in (["a", "b"], ["a", "b"], ["b"]):
        saved(backend, good("b"))
        assert names(backend) == expected
    assert not BackendModel.objects.filter(name="a").exists()


def test_failed_polls_and_one_that_lists_it_again_start_the_count_anew() -> None:
    backend = make_backend()
    saved(backend, good("a"))
    for result in (good(), good(), good("a"), good(), ProbeResult(reachable=None), good()):
        saved(backend, result)
    assert names(backend) == ["a"]


def test_rows_made_by_hand_stay_and_hand_set_values_are_never_touched() -> None:
    backend = make_backend()
    by_hand = BackendModel.objects.create(
        backend=backend, name="m", vision=False, context_length=100, vram_mib=7.0
    )
    told = ModelInfo(name="m", vision=True, tools=True, context_length=8192, vram_mib=512.0)
    saved(backend, good(told))
    by_hand.refresh_from_db()
    assert (by_hand.vision, by_hand.context_length, by_hand.vram_mib) == (False, 100, 7.0)
    assert (by_hand.detected_vision, by_hand.detected_tools) == (True, True)
    assert (by_hand.by_hand, by_hand.listed) == (True, True)
    for _ in range(4):
        saved(backend, good())
    by_hand.refresh_from_db()
    assert (by_hand.by_hand, by_hand.listed, by_hand.context_length) == (True, False, 100)


def test_a_found_model_with_hand_set_values_is_not_offered_while_unlisted_but_not_lost() -> None:
    backend = make_backend()
    saved(backend, good("m"))
    BackendModel.objects.update(tools=True)
    for _ in range(3):
        saved(backend, good())
    assert names(backend) == []
    saved(backend, good("m"))
    row = BackendModel.objects.get(name="m")
    assert (row.listed, row.tools, row.by_hand) == (True, True, False)


def test_unknown_details_do_not_erase_known_ones_but_a_full_answer_does() -> None:
    backend = make_backend()
    saved(backend, good(ModelInfo(name="m", tools=True, json=True)))
    saved(backend, good(ModelInfo(name="m", json=True, detailed=False)))
    row = BackendModel.objects.get(name="m")
    assert (row.detected_tools, row.detected_json) == (True, True)
    saved(backend, good(ModelInfo(name="m", json=True)))
    row.refresh_from_db()
    assert (row.detected_tools, row.detected_json) == (None, True)


def test_the_context_of_a_model_is_what_it_last_ran_with_within_its_limit() -> None:
    backend = make_backend()
    lengths = []
    for length, limit in ((None, 131072), (4096, 131072), (None, 131072), (None, 2048)):
        told = ModelInfo(name="m", context_length=length, context_limit=limit)
        saved(backend, good(told, engine="ollama"))
        lengths.append(BackendModel.objects.get(name="m").detected_context_length)
    assert lengths == [131072, 4096, 4096, 2048]


def test_the_memory_a_model_needs_is_as_last_measured_and_at_least_its_weights() -> None:
    backend = make_backend()
    needs = []
    for loaded, weights in ((None, 4096.0), (5000.0, 4096.0), (5200.0, 4096.0), (None, 4096.0)):
        told = ModelInfo(name="m", vram_mib=loaded, vram_at_least_mib=weights)
        saved(backend, good(told, engine="ollama"))
        needs.append(BackendModel.objects.get(name="m").detected_vram_mib)
    assert needs == [4096.0, 5000.0, 5000.0, 5000.0]


def test_a_poll_that_finds_nothing_new_changes_no_configuration() -> None:
    backend = make_backend()
    told = ModelInfo(name="m", tools=True, context_length=8192, vram_mib=512.0)
    saved(backend, good(told, running=1))
    before = configuration_version()
    saved(backend, good(told, running=5, loaded={"m": None}))
    saved(backend, ProbeResult(reachable=False, error="refused"))
    saved(backend, good(told, "other"))
    assert configuration_version() == before + 1  # the other model
    saved(backend, good(told))
    saved(backend, good(told))
    assert configuration_version() == before + 1


def test_another_engine_counts_as_a_change_of_configuration() -> None:
    backend = make_backend()
    saved(backend, good("m", engine="openai"))
    before = configuration_version()
    saved(backend, good("m", engine="ollama"))
    assert configuration_version() == before + 1


def test_a_poll_of_a_hundred_unchanged_models_takes_a_fixed_number_of_queries(
    django_assert_max_num_queries: Any,
) -> None:
    backend = make_backend()
    models = [f"m{number}" for number in range(100)]
    saved(backend, good(*models))
    copy = claimed(backend)
    with django_assert_max_num_queries(7):
        save_observation(copy, good(*models))


# ---- memory of nodes


def node_with(gpus: list[Gpu], moment: datetime) -> Node:
    node = Node.objects.create(name="gpu-1", telemetry_url="http://gpu-1:9400/metrics")
    NodeStatus.objects.create(node=node)
    save_node(node, moment, gpus, "")
    return node


TWO_CARDS = [
    Gpu(index="0", memory_total_mib=40960.0, memory_free_mib=20480.0, utilization=1.0),
    Gpu(index="1", memory_total_mib=40960.0, memory_free_mib=10240.0, utilization=0.5),
]


def test_a_backend_has_the_memory_of_its_node() -> None:
    now = timezone.now()
    backend = make_backend(node=node_with(TWO_CARDS, now))
    saved(backend, good("m"), later(1, now))
    status = status_of(backend)
    assert (status.vram_total_mib, status.vram_free_mib) == (81920.0, 30720.0)
    assert status.gpu_use == 0.75


def test_what_the_engine_itself_says_goes_before_its_node() -> None:
    now = timezone.now()
    backend = make_backend(node=node_with(TWO_CARDS, now))
    saved(backend, good("m", vram_free_mib=100.0), later(1, now))
    status = status_of(backend)
    assert (status.vram_total_mib, status.vram_free_mib) == (81920.0, 100.0)


def test_old_telemetry_of_a_node_is_unknown_and_not_zero() -> None:
    now = timezone.now()
    backend = make_backend(node=node_with(TWO_CARDS, now))
    saved(backend, good("m"), later(31, now))
    status = status_of(backend)
    assert (status.vram_total_mib, status.vram_free_mib, status.gpu_use) == (None, None, None)


def test_a_node_that_fails_keeps_its_last_telemetry() -> None:
    now = timezone.now()
    node = node_with(TWO_CARDS, now)
    save_node(node, later(5, now), None, "no answer")
    save_node(node, later(-5, now), [], "")  # an older answer that comes late
    status = NodeStatus.objects.get(node=node)
    assert (len(status.gpus), status.observed_at) == (2, now)


def test_nodes_are_polled_in_both_forms_each_by_one(settings: Any) -> None:
    with node_stub() as stub:
        for path in ("gpu-info", "metrics"):
            Node.objects.create(name=path, telemetry_url=f"{stub.url}/{path}", telemetry_key="k-1")
        Node.objects.create(name="silent")
        assert poll_due() == 2
        assert poll_due() == 0
        assert {asked.headers["x-sidecar-key"] for asked in stub.asked} == {"k-1"}
    frees = [
        sum(gpu["memory_free_mib"] for gpu in status.gpus) for status in NodeStatus.objects.all()
    ]
    assert frees == [59904.0, 59456.0]
    assert claim_due_nodes(later(4.5)) == list(Node.objects.exclude(name="silent"))


@pytest.mark.parametrize("fault", ["hang", "html", "500", "garbage", "huge"])
def test_a_node_that_misbehaves_is_noted_and_costs_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "TOTAL_SECONDS", 0.2)
    with node_stub() as stub:
        stub.fault = fault
        Node.objects.create(name="n", telemetry_url=f"{stub.url}/gpu-info")
        poll_due()
    status = NodeStatus.objects.get()
    assert (status.observed_at, status.gpus) == (None, [])
    assert status.error


# ---- the whole way


def test_every_due_backend_is_polled_and_its_models_are_there_afterwards() -> None:
    model = OllamaModel("llama3.2:latest", size_vram=1024 * 1024 * 512)
    with vllm_stub("a") as one, ollama_stub(model) as two, llamacpp_stub("b") as three:
        backends = [make_backend(base_url=stub.url) for stub in (one, two, three)]
        assert poll_due() == 3
    assert [names(backend) for backend in backends] == [["a"], ["llama3.2:latest"], ["b"]]
    assert [status_of(backend).detected_engine for backend in backends] == [
        "vllm",
        "ollama",
        "llamacpp",
    ]
    assert status_of(backends[1]).loaded_models == {"llama3.2:latest": 512.0}
    assert not BackendStatus.objects.exclude(claimed_until=None).exists()


def test_one_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    keep = services.save_observation

    def noted(backend: Backend, result: ProbeResult) -> bool:
        order.append(backend.name)
        return keep(backend, result)

    monkeypatch.setattr(services, "save_observation", noted)
    with vllm_stub() as hung, vllm_stub() as well:
        hung.fault = "hang"
        slow, fast = make_backend(base_url=hung.url), make_backend(base_url=well.url)
        probe_backends([slow.pk, fast.pk], seconds=2)
    assert order == [fast.name, slow.name]
    assert (status_of(slow).reachable, status_of(fast).reachable) == (None, True)


def test_an_outcome_that_cannot_be_kept_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep = services.save_observation
    with openai_stub("m") as stub:
        bad, fine = make_backend(base_url=stub.url), make_backend(base_url=stub.url)

        def failing(backend: Backend, result: ProbeResult) -> bool:
            if backend == bad:
                raise RuntimeError("the disk is full")
            return keep(backend, result)

        monkeypatch.setattr(services, "save_observation", failing)
        poll_due()
    assert names(fine) == ["m"]
    assert status_of(bad).claimed_until is None
    assert "the disk is full" in caplog.text


@pytest.fixture
def far_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a limit for the one that was asked for takes far too long."""
    monkeypatch.setattr(services, "_PROBE_SECONDS", 60.0)
    monkeypatch.setattr(services, "TOTAL_SECONDS", 60.0)
    monkeypatch.setattr(probing, "TOTAL_SECONDS", 60.0)
    monkeypatch.setitem(probe_backends.__kwdefaults__, "seconds", 60.0)
    monkeypatch.setattr(services.poll, "__defaults__", (60.0,))
    monkeypatch.setattr(services.target_of, "__defaults__", (60.0,))


class StoppedClock:
    """Time that passes in sleeps alone, however slow the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.usefixtures("far_defaults")
def test_probing_now_takes_bounded_time_and_raises_nothing() -> None:
    with vllm_stub() as hung, vllm_stub() as well:
        hung.fault = "hang"
        urls = [hung.url, "http://127.0.0.1:9", "http://no-such-host.invalid", well.url]
        backends = [make_backend(base_url=url, enabled=False) for url in urls]
        began = time.monotonic()
        probe_backends([backend.pk for backend in backends] + [987654], seconds=2)
        assert 2 <= time.monotonic() - began < 5
    assert [status_of(b).reachable for b in backends] == [None, False, None, True]
    assert status_of(backends[0]).error == "no whole answer within 2 s"


@pytest.mark.usefixtures("far_defaults")
def test_probing_waits_for_a_poll_that_is_under_way_instead_of_adding_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = StoppedClock()
    monkeypatch.setattr(services, "time", clock)
    with vllm_stub() as stub:
        backend = make_backend(base_url=stub.url)
        claimed(backend)
        probe_backends([backend.pk], seconds=0.3)
        assert 0.3 <= clock.now < 0.4  # it looks each 0.05 s
        assert stub.asked == []


def test_the_second_poll_of_a_backend_knows_its_engine() -> None:
    with vllm_stub() as stub:
        backend = make_backend(base_url=stub.url)
        probe_backends([backend.pk])
        stub.asked.clear()
        probe_backends([backend.pk])
        assert stub.count("/api/version") == 0
        assert stub.count("/health") == 1


def test_one_good_poll_repairs_what_failed_ones_left() -> None:
    model = OllamaModel("m:latest", size_vram=1024 * 1024)
    with ollama_stub(model) as stub:
        backend = make_backend(base_url=stub.url)
        probe_backends([backend.pk])
        stub.fault = "hang"
        probe_backends([backend.pk], seconds=0.2)
        assert status_of(backend).loaded_models == {"m:latest": 1.0}
        stub.fault = None
        stub.answers["/api/ps"] = Answer({"models": []})
        probe_backends([backend.pk])
    status = status_of(backend)
    assert (status.reachable, status.loaded_models, status.error) == (True, {}, "")


def test_a_server_can_be_asked_what_it_is_without_a_row() -> None:
    with llamacpp_stub() as stub:
        result = detect(stub.url + "/v1", "sk-1")
        assert {asked.headers["authorization"] for asked in stub.asked} == {"Bearer sk-1"}
    assert (result.engine, result.reachable) == ("llamacpp", True)
    assert detect("http://127.0.0.1:9").reachable is False


async def test_probing_from_a_page_leaves_the_gateways_loop_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loops = []

    async def noted(target: Target) -> ProbeResult:
        loops.append(asyncio.get_running_loop())
        return ProbeResult(reachable=None)

    monkeypatch.setattr(services, "probe", noted)
    await sync_to_async(detect)("http://127.0.0.1:9")
    assert len(loops) == 1
    assert loops[0] is not asyncio.get_running_loop()
