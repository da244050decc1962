"""Which names a backend answers to, and what its last poll is worth. No database."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from backends.catalog import effective_engine, models_by_name, polled, with_tag
from scheduler.core.jobs import ModelSpec, Telemetry

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
LATER = datetime(2026, 6, 1, 12, 0, 5, tzinfo=UTC)


@dataclass
class Row:
    """A model's row; unset values are unknown."""

    name: str
    by_hand: bool = False
    listed: bool = True
    vision: bool | None = None
    tools: bool | None = None
    json: bool | None = None
    embeddings: bool | None = None
    rerank: bool | None = None
    transcription: bool | None = None
    speech: bool | None = None
    images: bool | None = None
    moderation: bool | None = None
    context_length: int | None = None
    vram_mib: float | None = None
    detected_vision: bool | None = None
    detected_tools: bool | None = None
    detected_json: bool | None = None
    detected_embeddings: bool | None = None
    detected_rerank: bool | None = None
    detected_transcription: bool | None = None
    detected_speech: bool | None = None
    detected_images: bool | None = None
    detected_moderation: bool | None = None
    detected_context_length: int | None = None
    detected_vram_mib: float | None = None


@dataclass
class Status:
    observed_at: datetime | None = None
    answered_at: datetime | None = None
    reachable: bool | None = None
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None
    gpu_use: float | None = None
    loaded_models: dict[str, float | None] | None = None
    vram_total_mib: float | None = None
    vram_free_mib: float | None = None


@dataclass
class Cluster:
    """The backends of the case: A is Ollama, B is vLLM."""

    a: dict[str, ModelSpec] = field(
        default_factory=lambda: models_by_name(
            "ollama", [Row("llama3.2:latest"), Row("qwen3:4b-q4_K_M")]
        )
    )
    b: dict[str, ModelSpec] = field(
        default_factory=lambda: models_by_name("vllm", [Row("llama3.2")])
    )

    def who_has(self, name: str) -> dict[str, str]:
        """{backend: the name it is sent}"""
        both = {"a": self.a, "b": self.b}
        return {key: models[name].name for key, models in both.items() if name in models}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ("llama3.2", {"a": "llama3.2:latest", "b": "llama3.2"}),
        ("llama3.2:latest", {"a": "llama3.2:latest"}),
        ("qwen3", {}),
        ("qwen3:latest", {}),
        ("qwen3:4b-q4_K_M", {"a": "qwen3:4b-q4_K_M"}),
        ("nope", {}),
        ("LLAMA3.2", {}),
    ],
)
def test_ollama_implies_the_tag_latest_and_nobody_else_does(
    asked: str, sent: dict[str, str]
) -> None:
    assert Cluster().who_has(asked) == sent


@pytest.mark.parametrize(
    ("name", "tagged"),
    [
        ("a", "a:latest"),
        ("a:latest", "a:latest"),
        ("a:7b", "a:7b"),
        ("hub:5000/library/a", "hub:5000/library/a:latest"),
        ("hub:5000/library/a:7b", "hub:5000/library/a:7b"),
    ],
)
def test_only_the_last_part_of_a_name_carries_a_tag(name: str, tagged: str) -> None:
    assert with_tag(name) == tagged


def test_a_hand_set_value_wins_over_the_detected_one() -> None:
    row = Row("m", vision=False, context_length=100, detected_vision=True, detected_tools=True)
    row.detected_context_length = 8192
    assert models_by_name("vllm", [row]) == {
        "m": ModelSpec(name="m", vision=False, tools=True, context_length=100)
    }


def test_values_set_by_hand_under_the_short_name_hold_for_the_model_that_ollama_lists() -> None:
    by_hand = Row("m", by_hand=True, listed=False, context_length=100)
    found = Row("m:latest", detected_context_length=8192, detected_tools=True)
    spec = ModelSpec(name="m:latest", tools=True, context_length=100)
    assert models_by_name("ollama", [by_hand, found]) == {"m": spec, "m:latest": spec}


def test_a_model_neither_listed_nor_named_by_hand_is_not_offered() -> None:
    rows = [Row("gone", listed=False, vision=True), Row("kept", by_hand=True, listed=False)]
    assert list(models_by_name("openai", rows)) == ["kept"]


def test_the_engine_is_the_chosen_one_then_the_detected_one_then_the_plainest() -> None:
    assert effective_engine("vllm", "ollama") == "vllm"
    assert effective_engine("auto", "ollama") == "ollama"
    assert effective_engine("auto", "") == "openai"


def test_a_backend_that_was_never_heard_of_has_no_telemetry() -> None:
    assert polled("vllm", Status()) is None
    assert polled("vllm", Status(answered_at=LATER)) is None


def test_a_refused_connection_voids_the_numbers_of_the_server_that_is_gone() -> None:
    status = Status(observed_at=NOON, answered_at=LATER, reachable=False, running=3)
    assert polled("vllm", status) == (LATER, Telemetry(observed_at=0.0, reachable=False))


def test_after_a_time_out_the_last_good_numbers_stand_with_their_age() -> None:
    status = Status(observed_at=NOON, answered_at=LATER, running=3, waiting=0, kv_use=0.25)
    status.vram_free_mib = 20480.0
    assert polled("vllm", status) == (
        NOON,
        Telemetry(observed_at=0.0, running=3, waiting=0, utilization=0.25, vram_free_mib=20480.0),
    )


@pytest.mark.parametrize(
    ("kv_use", "gpu_use", "utilization"), [(0.2, 0.9, 0.2), (None, 0.9, 0.9), (0.0, 0.9, 0.0)]
)
def test_utilization_is_the_kv_caches_else_the_gpus(
    kv_use: float | None, gpu_use: float | None, utilization: float
) -> None:
    status = Status(observed_at=NOON, kv_use=kv_use, gpu_use=gpu_use)
    known = polled("vllm", status)
    assert known is not None
    assert known[1].utilization == utilization


def test_a_loaded_model_is_known_under_both_of_its_ollama_names() -> None:
    status: Any = Status(observed_at=NOON, loaded_models={"m:latest": 512.0, "q:4b": None})
    names = [polled(engine, status)[1].loaded_models for engine in ("ollama", "vllm")]  # type: ignore[index]
    assert names == [{"m", "m:latest", "q:4b"}, {"m:latest", "q:4b"}]
