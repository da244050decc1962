"""Chat, completions and embeddings, streamed and not, as clients and backends see them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mindrouter.gateway.protocol import GatewayProtocol
from tests.running import HELLO, RunningRouter, body, events, said
from tests.stubs.openai_stub import Call, OpenAIStub, ordinary, stream

pytestmark = pytest.mark.usefixtures("backend")

PATHS = {
    "chat.completions": ("/v1/chat/completions", {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "embeddings": ("/v1/embeddings", {"input": ["Hello", "world"]}),
}


@pytest.fixture(params=[GatewayProtocol, HttpToolsProtocol], ids=["protocol", "consumer"])
def protocol(request: pytest.FixtureRequest) -> type[HttpToolsProtocol]:
    """The same for both: any server but our own comes in through the consumer."""
    return request.param  # type: ignore[no-any-return]


# ---- whole answers


@pytest.mark.parametrize("endpoint", PATHS)
async def test_an_answer_reaches_the_client_byte_by_byte_as_it_came(
    router: RunningRouter, stub: OpenAIStub, endpoint: str
) -> None:
    path, fields = PATHS[endpoint]
    response = await router.client.post(path, json={"model": "m"} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    call = stub.calls[0]
    assert call.path == path
    assert response.content == json.dumps(call.document(), ensure_ascii=False).encode()
    record = await router.record()
    assert record.outcome == "completed"
    assert record.endpoint == endpoint
    assert (record.status, record.reason, record.stream) == (200, "", False)
    output = 0 if endpoint == "embeddings" else 3
    assert (record.prompt_tokens, record.completion_tokens) == (7, output)
    assert not record.usage_estimated
    assert record.charged_tokens == 7 + output


@pytest.mark.parametrize("endpoint", ["chat.completions", "completions"])
async def test_a_stream_reaches_the_client_event_by_event(
    router: RunningRouter, stub: OpenAIStub, endpoint: str
) -> None:
    path, fields = PATHS[endpoint]
    asked = {"model": "m", "stream": True, "stream_options": {"include_usage": True}} | fields
    response = await router.client.post(path, json=asked)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.content == b"".join(stub.calls[0].events())
    record = await router.record()
    assert (record.outcome, record.status, record.stream) == ("completed", 200, True)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert record.charged_tokens == 10


async def test_the_first_event_arrives_while_the_second_is_still_to_come(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    go_on = asyncio.Event()

    async def two_parts(call: Call) -> None:
        await call.start_stream()
        await call.say("first")
        await go_on.wait()
        await call.say("second")
        await call.finish()
        await call.end()

    stub.then(two_parts)
    async with router.client.stream(
        "POST", "/v1/chat/completions", json=body(stream=True)
    ) as response:
        parts = response.aiter_bytes()
        assert said((await anext(parts)).decode()) == "first"
        go_on.set()
        rest = b"".join([part async for part in parts])
    assert said(rest.decode()) == "second"


async def test_the_record_tells_the_whole_way(router: RunningRouter, backend: int) -> None:
    response = await router.chat(stream=True, user="x", max_tokens=5)
    record = await router.record()
    assert record.request_id == response.headers["x-request-id"]
    assert record.client_request_id is None
    assert (record.user, record.group, record.dialect) == ("ada", "ada", "openai")
    assert (record.model_requested, record.model_served) == ("m", "m")
    assert record.selected_backend_id == backend
    assert record.selected_backend == "a"
    assert record.candidate_backends == [backend]
    assert record.user_weight == 1
    moments = [
        record.arrived_at,
        record.queued_at,
        record.dispatched_at,
        record.first_byte_at,
        record.first_token_at,
        record.ended_at,
    ]
    assert None not in moments
    assert moments == sorted(moments)
    (attempt,) = record.attempts
    assert (attempt["backend"], attempt["status"], attempt["reason"]) == ("a", 200, "")
    assert attempt["started_at"] <= attempt["ended_at"]
    assert record.configuration_version == router.runtime.snapshot.version


async def test_response_headers_say_where_it_went(router: RunningRouter) -> None:
    for streamed in (False, True):
        headers = (await router.chat(stream=streamed)).headers
        assert headers["x-mindrouter-backend"] == "a"
        assert int(headers["x-mindrouter-queue-ms"]) < 1000
        assert headers["x-mindrouter-reason"]
        assert len(headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("my-id_7.x", "my-id_7.x"),
        ("a" * 128, "a" * 128),
        ("a" * 129, None),
        ("with space", None),
        ("größe".encode(), None),
        ("", None),
    ],
)
async def test_a_clients_own_request_id_is_kept_if_it_is_well_formed(
    router: RunningRouter, stub: OpenAIStub, given: Any, kept: str | None
) -> None:
    response = await router.client.post(
        "/v1/chat/completions", json=body(), headers={"X-Request-Id": given}
    )
    own = response.headers["x-request-id"]
    assert own != given
    assert stub.calls[0].headers["x-request-id"] == own
    assert (await router.record()).client_request_id == kept


# ---- B01, B07, B35: streams as they come

WORDS = ["Größe ", "漢字", "😀!"]


@pytest.mark.parametrize("way", ["bytewise", "cut", "at once"])
async def test_characters_cut_by_reads_arrive_whole(
    router: RunningRouter, stub: OpenAIStub, way: str
) -> None:
    stub.words = WORDS
    sent: list[bytes] = []

    async def cut_anywhere(call: Call) -> None:
        sent.extend(call.events())
        whole = b"".join(sent)
        if way == "bytewise":
            pieces = [whole[i : i + 1] for i in range(len(whole))]
        elif way == "cut":
            cuts = sorted(random.Random(7).sample(range(1, len(whole)), 30))
            pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        else:
            pieces = [whole]
        await stream(*pieces)(call)

    stub.then(cut_anywhere)
    response = await router.chat(stream=True, stream_options={"include_usage": True})
    assert said(response.text) == "Größe 漢字😀!"
    assert response.content == b"".join(sent)
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert not record.usage_estimated


@pytest.mark.parametrize("asks", [False, True])
async def test_usage_is_counted_always_and_shown_only_when_asked_for(
    router: RunningRouter, stub: OpenAIStub, asks: bool
) -> None:
    stub.words, stub.prompt_tokens = ["a", "b"], 98
    options = {"stream_options": {"include_usage": True}} if asks else {}
    response = await router.chat(stream=True, **options)
    usages = [event for event in events(response.text) if not event["choices"]]
    assert len(usages) == (1 if asks else 0)
    assert response.content.endswith(b"data: [DONE]\n\n")
    record = await router.record()
    assert (record.prompt_tokens, record.completion_tokens) == (98, 2)
    assert not record.usage_estimated


async def test_a_stream_without_usage_is_estimated_and_charged(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.words, stub.tells_usage = [f"word{n} " for n in range(37)], False
    prompt = " ".join(["word"] * 60)
    response = await router.chat(stream=True, messages=[{"role": "user", "content": prompt}])
    assert b'"usage"' not in response.content
    record = await router.record()
    assert record.usage_estimated
    assert record.completion_tokens == 37
    assert 0.7 * 80 < record.prompt_tokens < 1.3 * 80  # 60 words of 5 bytes
    assert record.charged_tokens == record.prompt_tokens + 37


async def test_a_whole_answer_without_usage_is_estimated_too(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.words, stub.tells_usage = ["four"] * 40, False  # 160 bytes: 40 tokens
    await router.chat()
    record = await router.record()
    assert record.usage_estimated
    assert record.completion_tokens == 40


async def test_an_empty_answer_is_an_answer(router: RunningRouter, stub: OpenAIStub) -> None:
    stub.words, stub.tells_usage = [], False
    response = await router.chat(stream=True)
    assert response.content == b"".join(stub.calls[0].events())
    record = await router.record()
    assert (record.outcome, record.completion_tokens) == ("completed", 0)


async def test_a_stream_that_only_finishes_is_whole_without_done(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async def no_done(call: Call) -> None:
        await stream(*call.events()[:-1])(call)

    stub.then(no_done)
    response = await router.chat(stream=True)
    assert b"error" not in response.content
    assert b"[DONE]" not in response.content
    assert (await router.record()).outcome == "completed"


async def never_ending(call: Call) -> None:
    """Everything up to [DONE], but never the end of the body."""
    await call.start_stream()
    for event in call.events():
        await call.connection.chunk(event)
    await call.connection.stall()


async def test_a_client_that_leaves_at_done_has_had_a_whole_answer(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(never_ending)
    async with await router.raw() as client:
        client.post(stream=True)
        await client.until(b"[DONE]\n\n")
        client.close()
        record = await router.record()
    assert (record.outcome, record.completion_tokens) == ("completed", 3)
    assert not record.usage_estimated


async def test_a_backend_that_does_not_end_after_done_holds_nothing_up(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    stub.then(never_ending)
    response = await asyncio.wait_for(router.chat(stream=True), 20)
    assert response.content.endswith(b"[DONE]\n\n")
    assert router.in_flight == 0


# ---- B11: what the backend gets


async def test_unknown_fields_pass_unchanged(router: RunningRouter, stub: OpenAIStub) -> None:
    sent = (
        b'{"model":"m","messages":[{"role":"user","content":"Gr\xc3\xb6\xc3\x9fe","extra":[1.0]}],'
        b'"chat_template_kwargs":{"enable_thinking":false},"guided_json":{"a":{"b":[1,2.50]}},'
        b'"min_p":0.05,"cache_salt":"x","seed":9007199254740993,"temperature":1.0}'
    )
    response = await router.client.post("/v1/chat/completions", content=sent)
    assert response.status_code == 200
    assert stub.calls[0].request.body == sent
    await router.client.post("/v1/chat/completions", content=sent[:-1] + b',"stream":true}')
    assert stub.calls[1].request.body == (
        sent[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'
    )


async def test_a_content_type_is_not_insisted_on(router: RunningRouter, stub: OpenAIStub) -> None:
    data = json.dumps(body()).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await router.client.post(
            "/v1/chat/completions", content=data, headers={"Content-Type": kind}
        )
        assert response.status_code == 200
    assert stub.calls[0].headers["content-type"] == "application/json"


# ---- B49: headers


async def test_nothing_of_the_clients_headers_reaches_the_backend(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    secret = "s3cret"
    async with await router.raw() as client:
        data = json.dumps(body()).encode()
        client.send(
            "POST /v1/chat/completions",
            {
                "Content-Length": str(len(data)),
                "Cookie": f"sessionid={secret}; csrftoken={secret}",
                "X-Api-Key": secret,
                "Proxy-Authorization": f"Basic {secret}",
                "Connection": "keep-alive, x-drop",
                "X-Drop": secret,
                "TE": "trailers",
                "X-Forwarded-For": secret,
                "OpenAI-Organization": secret,
            },
            data,
        )
        status, _, _ = await client.response()
    assert status == 200
    head = stub.calls[0].request.raw_head
    assert secret.encode() not in head
    assert router.key.encode() not in head
    headers = stub.calls[0].request.headers
    assert dict(headers).keys() == {
        "host", "accept-encoding", "content-type", "user-agent", "x-request-id", "content-length",
    }  # fmt: skip
    assert dict(headers)["host"] == stub.url.removeprefix("http://")


async def test_a_backend_gets_its_own_key(router: RunningRouter, stub: OpenAIStub) -> None:
    await router.backend(stub, "keyed", models=("keyed",), api_key="sk-backend")
    await router.chat(model="keyed")
    assert stub.calls[0].headers["authorization"] == "Bearer sk-backend"


@pytest.mark.parametrize("streamed", [False, True])
async def test_nothing_of_the_backends_headers_reaches_the_client(
    router: RunningRouter, stub: OpenAIStub, streamed: bool
) -> None:
    more = [
        ("Set-Cookie", "a=b"), ("Server", "uvicorn"), ("X-Backend", stub.url),
        ("Location", stub.url), ("X-Request-Id", "theirs"), ("Access-Control-Allow-Origin", "*"),
    ]  # fmt: skip

    async def talkative(call: Call) -> None:
        if call.is_stream:
            kind = ("Content-Type", "text/event-stream")
            await call.connection.stream(call.events(), [kind, *more])
        else:
            await call.json(call.document(), headers=more)

    stub.then(talkative)
    response = await router.chat(stream=streamed)
    assert stub.url.encode() not in b"".join(v for _, v in response.headers.raw)
    assert response.headers["x-request-id"] != "theirs"
    for name in ("set-cookie", "server", "x-backend", "location", "access-control-allow-origin"):
        assert name not in response.headers


# ---- real client libraries


@pytest.fixture
async def sdk(router: RunningRouter) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=router.key, max_retries=0)
    yield client
    await client.close()


async def test_the_openai_sdk_is_served(sdk: openai.AsyncOpenAI, router: RunningRouter) -> None:
    answer = await sdk.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer._request_id
    old = await sdk.completions.create(model="m", prompt="Hello")
    assert old.choices[0].text == "Hello, world"
    vectors = await sdk.embeddings.create(model="m", input=["a", "b"])
    assert [d.embedding for d in vectors.data] == [[0.25, -0.5, 1.0]] * 2
    assert [model.id async for model in sdk.models.list()] == ["m"]
    assert (await sdk.models.retrieve("m")).id == "m"


async def test_the_openai_sdk_streams(sdk: openai.AsyncOpenAI, router: RunningRouter) -> None:
    chunks = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == "Hello, world"
    chunks = await sdk.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    usages = [c.usage async for c in chunks if c.usage]
    assert [u.total_tokens for u in usages] == [10]
    assert {r.outcome for r in await router.records()} == {"completed"}


async def test_the_openai_sdk_names_each_refusal(
    sdk: openai.AsyncOpenAI, router: RunningRouter, stub: OpenAIStub
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="nope", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await sdk.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="mr-wrong").chat.completions.create(
            model="m", messages=HELLO
        )
    assert stub.calls == []


async def test_the_openai_sdk_sees_an_error_within_a_stream(
    sdk: openai.AsyncOpenAI, stub: OpenAIStub
) -> None:
    async def breaks(call: Call) -> None:
        await stream(*call.events()[:2], end=False)(call)

    stub.then(breaks)
    chunks = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert [(await anext(chunks)).choices[0].delta.content for _ in range(2)] == ["", "Hello"]
    with pytest.raises(openai.APIError, match="closed early"):
        await anext(chunks)


# ---- connections


async def test_a_kept_connection_serves_one_request_after_another(router: RunningRouter) -> None:
    async with await router.raw() as client:
        for _ in range(3):
            client.post()
            status, headers, _ = await client.response()
            assert status == 200
            assert headers.get("connection") != "close"
    assert len(await router.records()) == 3


async def test_requests_sent_ahead_are_answered_in_turn(router: RunningRouter) -> None:
    async with await router.raw() as client:
        for n in range(3):
            client.post(user=str(n))
        for _ in range(3):
            status, _, _ = await client.response()
            assert status == 200


async def test_connections_to_the_backend_are_kept_and_reused(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    for streamed in (False, True, True, False):
        await router.chat(stream=streamed)
    assert len(stub.calls) == 4
    assert len(stub.server.connections) == 1


async def test_many_requests_at_once_are_all_served_within_the_slots(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "wide", models=("wide",), max_concurrent=3, max_queue=200)

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.002)
        await ordinary(call)

    stub.behaviour = slow
    answers = await asyncio.gather(
        *(router.chat(model="wide", stream=bool(n % 2)) for n in range(100))
    )
    assert [a.status_code for a in answers] == [200] * 100
    assert stub.most_running == 3
    records = await router.records()
    assert len({r.request_id for r in records}) == len(records) == 100
    assert sum(r.charged_tokens for r in records) == 1000
