"""What each engine's answers are read as: captured ones, each version's, and lies. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engines import llamacpp, ollama, openai, sglang, vllm
from backends.engines.observation import ModelInfo, Observation
from backends.engines.replies import MAX_MODELS, Question, Replies, Reply
from backends.engines.table import DETECTION, ENGINES, detect
from scheduler.core.jobs import CAPABILITIES, TASKS

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str, server: str = "uvicorn") -> Reply:
    return Reply(200, (SAMPLES / name).read_bytes(), server)


def answer(body: Any, status: int = 200) -> Reply:
    return Reply(status, body if isinstance(body, bytes) else json.dumps(body).encode())


def with_follow_up(engine: str, replies: dict[Question, Reply], **later: Reply) -> Observation:
    """Parse ``replies`` with answers to the engine's further questions, by path."""
    reader = ENGINES[engine]
    further = {
        question: later[question.path.rpartition("/")[2].replace(".", "_")]
        for question in reader.follow_up(replies)
        if question.path.rpartition("/")[2].replace(".", "_") in later
    }
    return reader.parse({**replies, **further})


# ---- vLLM

VLLM: dict[Question, Reply] = {
    vllm.HEALTH: Reply(200),
    openai.MODELS: sample("vllm-v1-models.json"),
    vllm.VERSION: sample("vllm-version.json"),
    vllm.METRICS: sample("vllm-metrics-busy.txt"),
}


def test_a_busy_vllm_is_read_as_it_was_when_captured() -> None:
    models = tuple(
        ModelInfo(name=name, json=True, context_length=2048)
        for name in ("smollm2", "smollm2-alias")
    )
    assert vllm.parse(VLLM) == Observation(
        models=models,
        loaded={"smollm2": None, "smollm2-alias": None},
        running=2,
        waiting=3,
        kv_use=0.0055096418732781816,
        version="0.32.0",
        sleeping=False,
    )


def metrics(*lines: str) -> Observation:
    return vllm.parse({vllm.METRICS: answer("\n".join(lines).encode())})


def test_the_counts_of_several_engines_are_summed_and_the_cache_use_is_their_mean() -> None:
    seen = metrics(
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
        'vllm:num_requests_running{engine="1",model_name="m"} 5.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0',
        'vllm:num_requests_waiting{engine="1",model_name="m"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75',
    )
    assert (seen.running, seen.waiting, seen.kv_use) == (7, 1, 0.5)


def test_the_names_of_version_0_are_read_and_swapped_requests_wait() -> None:
    seen = metrics(
        'vllm:num_requests_running{model_name="m"} 4.0',
        'vllm:num_requests_waiting{model_name="m"} 1.0',
        'vllm:num_requests_swapped{model_name="m"} 2.0',
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5',
        'vllm:cpu_cache_usage_perc{model_name="m"} 0.9',
    )
    assert (seen.running, seen.waiting, seen.kv_use) == (4, 3, 0.5)


def test_the_newer_name_of_the_cache_use_wins() -> None:
    seen = metrics("vllm:gpu_cache_usage_perc 0.9", "vllm:kv_cache_usage_perc 0.0")
    assert seen.kv_use == 0.0


def test_series_that_only_begin_like_a_wanted_one_are_ignored() -> None:
    seen = metrics(
        "vllm:num_requests_running_created 1.79e+09",
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 3.0',
        "# TYPE vllm:num_requests_running gauge",
    )
    assert (seen.running, seen.waiting) == (None, None)


def test_a_label_may_contain_braces_blanks_and_quotes() -> None:
    seen = metrics('vllm:num_requests_running{model_name="a {b}\\" c"} 6 1700000000')
    assert seen.running == 6


def test_a_sleeping_vllm_cannot_serve_though_it_says_that_it_is_well() -> None:
    line = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0'
    seen = vllm.parse({**VLLM, vllm.METRICS: answer(line.encode())})
    assert (seen.sleeping, seen.loaded, seen.unready) == (True, None, "asleep until it is woken")


@pytest.mark.parametrize(
    ("paths", "embeddings"),
    [
        (["/v1/chat/completions"], False),
        (["/v1/embeddings"], True),
        (["/v1/chat/completions", "/v1/embeddings"], None),  # older versions serve both always
        ([], None),
    ],
)
def test_a_vllm_makes_embeddings_if_it_serves_their_path_and_not_the_chats(
    paths: list[str], embeddings: bool | None
) -> None:
    described = answer({"paths": {path: {"post": {}} for path in paths}, "info": {}})
    seen = with_follow_up("vllm", VLLM, openapi_json=described)
    assert seen.models is not None
    assert {model.embeddings for model in seen.models} == {embeddings}


@pytest.mark.parametrize(
    ("paths", "able"),
    [
        (["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"], {"rerank"}),
        (["/v1/audio/transcriptions", "/v1/audio/translations"], {"transcription"}),
        (["/v1/chat/completions", "/v1/audio/transcriptions"], {"transcription"}),
        (["/v1/audio/speech"], {"speech"}),
        (["/v1/images/generations", "/v1/images/edits"], {"images"}),
        (["/v1/embeddings", "/v1/rerank"], {"embeddings", "rerank"}),
    ],
)
def test_a_vllm_is_for_the_tasks_whose_paths_it_serves_and_for_no_others(
    paths: list[str], able: set[str]
) -> None:
    described = answer({"paths": {path: {"post": {}} for path in paths}, "info": {}})
    seen = with_follow_up("vllm", VLLM, openapi_json=described)
    assert seen.models is not None
    told = {name: getattr(seen.models[0], name) for name in ("embeddings", *TASKS)}
    assert told == {name: name in able for name in told}


def test_an_older_vllm_serves_every_path_which_tells_nothing_of_its_model() -> None:
    paths = ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions"]
    described = answer({"paths": {path: {"post": {}} for path in paths}, "info": {}})
    seen = with_follow_up("vllm", VLLM, openapi_json=described)
    assert seen.models is not None
    assert [getattr(seen.models[0], name) for name in TASKS] == [None] * 5


def test_vision_and_tools_of_a_vllm_are_unknown_whatever_its_models_are_called() -> None:
    listed = answer({"data": [{"id": "qwen2-vl-tools", "owned_by": "vllm"}]})
    seen = vllm.parse({openai.MODELS: listed})
    assert seen.models == (ModelInfo(name="qwen2-vl-tools", json=True),)


# ---- llama.cpp

LLAMACPP: dict[Question, Reply] = {
    llamacpp.HEALTH: Reply(200, b'{"status":"ok"}', "llama.cpp"),
    openai.MODELS: sample("llamacpp-v1-models.json", "llama.cpp"),
    llamacpp.PROPS: sample("llamacpp-props.json", "llama.cpp"),
    llamacpp.METRICS: sample("llamacpp-metrics-busy.txt", "llama.cpp"),
}


@pytest.mark.parametrize(("status", "embeddings"), [(501, False), (400, True), (500, None)])
def test_a_busy_llamacpp_is_read_as_it_was_when_captured(
    status: int, embeddings: bool | None
) -> None:
    seen = with_follow_up("llamacpp", LLAMACPP, embeddings=Reply(status))
    model = ModelInfo(
        name="smollm2",
        vision=False,
        tools=False,
        json=True,
        embeddings=embeddings,
        transcription=False,
        context_length=2048,
    )
    assert seen == Observation(
        models=(model,),
        loaded={"smollm2": None},
        running=2,
        waiting=3,
        slots=2,
        version="b0-unknown",
        sleeping=False,
    )


@pytest.mark.parametrize(("status", "reranks"), [(501, False), (400, True), (500, None)])
def test_a_llamacpp_reranks_unless_it_turns_an_empty_request_down_as_not_its_own(
    status: int, reranks: bool | None
) -> None:
    seen = with_follow_up("llamacpp", LLAMACPP, rerank=Reply(status))
    assert [model.rerank for model in seen.models or ()] == [reranks]


def test_a_llamacpp_that_hears_transcribes() -> None:
    props = json.loads((SAMPLES / "llamacpp-props.json").read_bytes())
    props["modalities"] = {"vision": False, "audio": True}
    seen = llamacpp.parse({**LLAMACPP, llamacpp.PROPS: answer(props)})
    assert [model.transcription for model in seen.models or ()] == [True]


def test_without_metrics_the_slots_tell_how_many_requests_run() -> None:
    replies = {**LLAMACPP, llamacpp.METRICS: Reply(501)}
    assert llamacpp.SLOTS in llamacpp.follow_up(replies)
    seen = llamacpp.parse({**replies, llamacpp.SLOTS: sample("llamacpp-slots-busy.json")})
    assert (seen.running, seen.waiting, seen.slots) == (2, None, 2)


def test_a_sleeping_llamacpp_is_asked_nothing_that_would_wake_it() -> None:
    props = json.loads((SAMPLES / "llamacpp-props.json").read_bytes()) | {"is_sleeping": True}
    replies = {**LLAMACPP, llamacpp.PROPS: answer(props), llamacpp.METRICS: Reply(501)}
    assert llamacpp.follow_up(replies) == ()
    seen = llamacpp.parse(replies)
    assert (seen.sleeping, seen.loaded, seen.unready) == (True, {}, "")


def test_a_llamacpp_router_tells_of_each_model_whether_it_is_loaded() -> None:
    entries = [
        {"id": "a", "owned_by": "llamacpp", "status": {"value": "loaded"}},
        {"id": "b", "owned_by": "llamacpp", "status": {"value": "unloaded"}},
    ]
    seen = llamacpp.parse({openai.MODELS: answer({"data": entries})})
    assert seen.loaded == {"a": None}
    assert [model.name for model in seen.models or ()] == ["a", "b"]


def test_without_properties_a_llamacpps_abilities_are_not_newly_unknown() -> None:
    seen = llamacpp.parse({openai.MODELS: LLAMACPP[openai.MODELS]})
    assert seen.models is not None
    assert seen.models[0].detailed is False


# ---- Ollama


def ollama_replies(entry: dict[str, Any], loaded: dict[str, Any] | None) -> dict[Question, Reply]:
    return {
        ollama.VERSION: answer({"version": "0.12.0"}),
        ollama.TAGS: answer({"models": [entry]}),
        ollama.LOADED: answer({"models": [loaded] if loaded else []}),
    }


ON_DISK = {"name": "llava:7b", "size": 4294967296, "digest": "abc", "details": {}}
LOADED = {
    "name": "llava:7b",
    "size": 5368709120,
    "size_vram": 2684354560,
    "context_length": 4096,
}
SHOWN = {
    "license": "long",
    "model_info": {"general.architecture": "llama", "llama.context_length": 131072},
    "capabilities": ["completion", "vision"],
}


def test_a_model_on_an_ollamas_disk_has_an_upper_limit_and_a_least_size() -> None:
    seen = with_follow_up("ollama", ollama_replies(ON_DISK, None), show=answer(SHOWN))
    model = ModelInfo(
        name="llava:7b",
        vision=True,
        tools=False,
        json=True,
        embeddings=False,
        images=False,
        context_limit=131072,
        vram_at_least_mib=4096.0,
    )
    assert seen == Observation(models=(model,), loaded={}, version="0.12.0")


def test_a_loaded_model_has_the_context_and_the_memory_that_it_runs_with() -> None:
    seen = with_follow_up("ollama", ollama_replies(ON_DISK, LOADED), show=answer(SHOWN))
    assert seen.loaded == {"llava:7b": 2560.0}  # the half of it that is on the GPU
    assert seen.models is not None
    assert (seen.models[0].context_length, seen.models[0].vram_mib) == (4096, 5120.0)


def test_an_embedding_model_makes_embeddings_and_obeys_no_schema() -> None:
    shown = SHOWN | {"capabilities": ["embedding"]}
    seen = with_follow_up("ollama", ollama_replies(ON_DISK, None), show=answer(shown))
    assert seen.models is not None
    assert (seen.models[0].embeddings, seen.models[0].json) == (True, False)


def test_details_are_asked_once_per_digest_and_version_of_the_server() -> None:
    def question(digest: str, version: str) -> Question:
        replies = ollama_replies(ON_DISK | {"digest": digest}, None)
        replies[ollama.VERSION] = answer({"version": version})
        return ollama.follow_up(replies)[0]

    assert question("abc", "0.12.0") == question("abc", "0.12.0")
    assert question("abc", "0.12.0").cache
    assert len({question("abc", "1"), question("abd", "1"), question("abc", "2")}) == 3


def test_capabilities_in_the_list_itself_spare_the_question() -> None:
    replies = ollama_replies(ON_DISK | {"capabilities": ["completion", "tools"]}, None)
    assert ollama.follow_up(replies) == ()
    models = ollama.parse(replies).models
    assert models is not None
    assert (models[0].tools, models[0].vision) == (True, False)


def test_a_version_that_does_not_tell_capabilities_leaves_them_unknown() -> None:
    shown = {"model_info": SHOWN["model_info"]}
    seen = with_follow_up("ollama", ollama_replies(ON_DISK, None), show=answer(shown))
    assert seen.models is not None
    assert (seen.models[0].tools, seen.models[0].json, seen.models[0].detailed) == (
        None,
        None,
        False,
    )
    assert seen.models[0].context_limit == 131072


# ---- SGLang

SGLANG: dict[Question, Reply] = {
    sglang.HEALTH: Reply(200),
    openai.MODELS: answer({"data": [{"id": "q", "owned_by": "sglang", "max_model_len": 32768}]}),
    sglang.INFO: answer(
        {
            "model_path": "/m/q",
            "is_generation": True,
            "has_image_understanding": True,
            "tool_call_parser": None,
        }
    ),
    sglang.LOADS: answer(
        {
            "version": "0.5.23",
            "loads": [
                {
                    "num_running_reqs": 3,
                    "num_waiting_reqs": 1,
                    "max_running_requests": 16,
                    "token_usage": 0.5,
                },
                {
                    "num_running_reqs": 4,
                    "num_waiting_reqs": 0,
                    "max_running_requests": 16,
                    "token_usage": 0.0,
                },
            ],
        }
    ),
}


def test_an_sglang_is_read_over_all_its_ranks() -> None:
    model = ModelInfo(
        name="q", vision=True, tools=False, json=True, embeddings=False, context_length=32768
    )
    assert sglang.parse(SGLANG) == Observation(
        models=(model,),
        loaded={"q": None},
        running=7,
        waiting=1,
        slots=32,
        kv_use=0.25,
        version="0.5.23",
    )
    assert sglang.follow_up(SGLANG) == ()


def test_an_older_sglang_is_read_from_its_older_path_and_its_metrics() -> None:
    replies = {openai.MODELS: SGLANG[openai.MODELS], sglang.INFO: Reply(404)}
    assert sglang.follow_up(replies) == (sglang.OLDER_INFO, sglang.METRICS)
    page = b"sglang:num_running_reqs 2\nsglang:num_queue_reqs 5\nsglang:token_usage 0.125\n"
    seen = sglang.parse(
        {
            **replies,
            sglang.OLDER_INFO: answer({"model_path": "/m/e", "is_generation": False}),
            sglang.METRICS: answer(page),
        }
    )
    assert (seen.running, seen.waiting, seen.kv_use) == (2, 5, 0.125)
    assert seen.models is not None
    assert (seen.models[0].embeddings, seen.models[0].tools) == (True, None)


# ---- plain servers


def test_a_plain_server_tells_its_models_and_nothing_else() -> None:
    listed = answer({"data": [{"id": "org/m", "context_length": 8192}, {"id": "n"}]})
    assert openai.parse({openai.MODELS: listed}) == Observation(
        models=(ModelInfo(name="org/m", context_length=8192), ModelInfo(name="n"))
    )


def test_an_empty_list_of_models_is_an_answer_and_no_list_is_none() -> None:
    assert openai.parse({openai.MODELS: answer({"data": []})}).models == ()
    assert openai.parse({openai.MODELS: answer({"data": {}})}).models is None


# ---- which engine it is


def listing(owner: str) -> Reply:
    return answer({"data": [{"id": "m", "owned_by": owner}]})


@pytest.mark.parametrize(
    ("replies", "engine"),
    [
        ({ollama.VERSION: answer({"version": "0.12.0"}), openai.MODELS: listing("x")}, "ollama"),
        (VLLM, "vllm"),
        (LLAMACPP, "llamacpp"),
        ({openai.MODELS: Reply(401, server="llama.cpp")}, "llamacpp"),
        (SGLANG, "sglang"),
        ({openai.MODELS: listing("x"), sglang.INFO: SGLANG[sglang.INFO]}, "sglang"),
        # SGLang also lists models as Ollama does; that alone is no proof.
        ({**SGLANG, ollama.TAGS: answer({"models": []})}, "sglang"),
        ({openai.MODELS: listing("acme")}, "openai"),
        ({openai.MODELS: answer({"data": []})}, "openai"),
        ({vllm.VERSION: answer({"version": "9"}), openai.MODELS: listing("acme")}, "openai"),
        ({openai.MODELS: answer(b"<html>")}, ""),
        ({}, ""),
    ],
)
def test_the_engine_is_told_by_its_answers(replies: Replies, engine: str) -> None:
    assert detect(replies) == engine


# ---- lies

NAMES = st.sampled_from(
    """data models id name model status value meta n_ctx aliases version size size_vram digest
    details capabilities model_info general.architecture context_length loads num_running_reqs
    token_usage max_running_requests total_slots is_sleeping modalities vision paths owned_by
    model_path max_model_len""".split()  # noqa: SIM905 - a list would take thirty lines
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
PAGES = st.lists(
    st.builds(
        "{}{} {}".format,
        st.sampled_from(["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "x", ""]),
        st.sampled_from(["", '{a="b"}', "{", "}", '{a="']),
        st.sampled_from(["1", "-3", "NaN", "+Inf", "1e999", "", "x", "2.5"]),
    ),
    max_size=6,
).map("\n".join)


def check(seen: Observation) -> None:
    """Whatever was said, what is kept can be stored and reckoned with."""
    for count in (seen.running, seen.waiting, seen.slots):
        assert count is None or 0 <= count < 2**31
    assert seen.kv_use is None or 0 <= seen.kv_use <= 1
    for model in seen.models or ():
        assert 0 < len(model.name) <= 300
        for context in (model.context_length, model.context_limit):
            assert context is None or 0 < context < 2**31
        for capability in CAPABILITIES:
            assert getattr(model, capability) in (True, False, None)
    assert len(seen.models or ()) <= MAX_MODELS
    json.dumps(dict(seen.loaded or {}), allow_nan=False)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_answer_whatsoever_makes_a_reader_fail(engine: str, data: st.DataObject) -> None:
    def lie() -> Reply:
        body = data.draw(
            JSON.map(lambda value: json.dumps(value).encode())
            | PAGES.map(str.encode)
            | st.binary(max_size=40)
        )
        return Reply(data.draw(st.sampled_from([200, 200, 200, 404, 500])), body)

    reader = ENGINES[engine]
    replies = {question: lie() for question in (*reader.questions, *DETECTION)}
    for question in reader.follow_up(replies):
        replies[question] = lie()
    check(reader.parse(replies))
    assert detect(replies) in {*ENGINES, ""}


@pytest.mark.parametrize(
    "value", [-1, "2", True, 2.5, 2**40, 10**400, float("inf"), float("nan"), [], {}, None]
)
def test_what_is_no_sensible_number_is_unknown(value: Any) -> None:
    entry = {"id": "m", "owned_by": "vllm", "max_model_len": value}
    seen = vllm.parse({openai.MODELS: answer({"data": [entry]})})
    # JSON knows neither NaN nor infinity: then the whole list is none.
    assert seen.models in ((ModelInfo(name="m", json=True),), None)


@pytest.mark.parametrize("name", ["", " ", "a" * 301, "a\nb", None, 7, {"x": 1}])
def test_a_model_without_a_usable_name_is_left_out(name: Any) -> None:
    listed = answer({"data": [{"id": name}, {"id": "ok"}, {"id": "ok"}, "x", None]})
    assert openai.parse({openai.MODELS: listed}).models == (ModelInfo(name="ok"),)


def test_a_list_of_very_many_models_is_cut() -> None:
    listed = answer({"data": [{"id": f"m{n}"} for n in range(5000)]})
    assert len(openai.parse({openai.MODELS: listed}).models or ()) == 1000
