"""Between a client and a backend: what is ambiguous is refused, and neither learns of the other.

Heads' sizes, deadlines and Hosts, double lengths, Expect and trailers are in ``test_protocol``; a
client's headers that no backend gets, and a backend's that no client gets, in
``test_completions``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from mindrouter.gateway import client as client_module
from tests.gateway.test_protocol import CHAT
from tests.running import RunningRouter, body, until
from tests.stubs.openai_stub import Call, OpenAIStub

pytestmark = pytest.mark.usefixtures("backend")

SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def post(*lines: str, data: bytes = b"", target: str = "/v1/chat/completions") -> bytes:
    head = "\r\n".join([f"POST {target} HTTP/1.1", "Host: x", *lines, "", ""])
    return head.encode("latin-1") + data


AMBIGUOUS: dict[str, bytes] = {
    "two lengths that differ": post("Content-Length: 5", "Content-Length: 6", data=b"hello"),
    "two lengths that agree": post("Content-Length: 5", "Content-Length: 5", data=b"hello"),
    "two lengths in one": post("Content-Length: 5, 6", data=b"hello"),
    "a length and chunks": post(
        "Content-Length: 5", "Transfer-Encoding: chunked", data=b"0\r\n\r\n"
    ),
    "chunks and a length": post(
        "Transfer-Encoding: chunked", "Content-Length: 5", data=b"0\r\n\r\n"
    ),
    "a signed length": post("Content-Length: +5", data=b"hello"),
    "a length in hex": post("Content-Length: 0x5", data=b"hello"),
    "a length with blanks within": post("Content-Length: 5 5", data=b"hello"),
    "a length without end": post("Content-Length: " + "9" * 30, data=b"hello"),
    "an empty length": post("Content-Length: ", data=b"hello"),
    "chunked twice": post("Transfer-Encoding: chunked, chunked", data=b"0\r\n\r\n"),
    "chunked not last": post("Transfer-Encoding: chunked, gzip", data=b"0\r\n\r\n"),
    "chunked misspelt": post("Transfer-Encoding: xchunked", data=b"0\r\n\r\n"),
    "chunked with a tab before": post("Transfer-Encoding: \x0bchunked", data=b"0\r\n\r\n"),
    "a coding in two headers": post(
        "Transfer-Encoding: identity", "Transfer-Encoding: chunked", data=b"0\r\n\r\n"
    ),
    "a name with a blank before its colon": post("Transfer-Encoding : chunked", data=b"0\r\n\r\n"),
    "a folded header": post("X-A: b", " c: d", "Content-Length: 0"),
    "a header folded with a tab": post("X-A: b", "\tContent-Length: 5", data=b"hello"),
    "a fold before the first header": b"GET /healthz HTTP/1.1\r\n X: y\r\nHost: x\r\n\r\n",
    "bare line feeds": b"POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
    "one bare line feed": b"GET /healthz HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n",
    "a bare carriage return": post("X-A: b\rContent-Length: 5", data=b"hello"),
    "a NUL in a header": post("X-A: b\x00c"),
    "no colon": post("X-A"),
    "no name": post(": x"),
    "a name with a bracket": post("X[A]: b"),
    "no version": b"GET /healthz\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "no version, but an offer of HTTP/2": (
        b"POST /healthz\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    ),
    "no Host, but an offer of HTTP/2": (
        b"POST /healthz HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    ),
    "HTTP/2's opening": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
}
CHUNKS: dict[str, bytes] = {
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "a size in words": b"five\r\nhello\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
    "a size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a size that overflows": b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "more than its size": b"3\r\nhello\r\n0\r\n\r\n",
    "less than its size": b"9\r\nhello\r\n0\r\n\r\n",
    "a bare line feed behind its size": b"5\nhello\r\n0\r\n\r\n",
    "a bare line feed behind it": b"5\r\nhello\n0\r\n\r\n",
}


async def answers_and_ends(router: RunningRouter, sent: bytes) -> str:
    """What comes of these bytes: the status and error of a single answer, or what else there is."""
    async with await router.raw() as client:
        client.writer.write(sent)
        answer = await client.to_end(60)
    is_one = answer.count(b"HTTP/1.1 ") == 1 and b'"code":"invalid_request"' in answer
    return answer[9:12].decode() if is_one else repr(answer)


async def test_an_ambiguous_request_is_refused_and_what_follows_it_is_not_read(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    found = {
        case: await answers_and_ends(router, sent + SMUGGLED) for case, sent in AMBIGUOUS.items()
    }
    assert found == dict.fromkeys(AMBIGUOUS, "400")
    assert stub.calls == []
    assert await router.records() == []


async def test_bad_chunks_are_refused_and_what_follows_them_is_not_read(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    lines = ("Transfer-Encoding: chunked", f"Authorization: Bearer {router.key}")
    found = {
        case: await answers_and_ends(router, post(*lines, data=data + SMUGGLED))
        for case, data in CHUNKS.items()
    }
    assert found == dict.fromkeys(CHUNKS, "400")
    assert stub.calls == []


# ---- slow


async def test_a_body_that_stops_coming_is_not_waited_for(
    router: RunningRouter, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BODY_SECONDS", 0.1)
    for framing, begun in (
        ({"Content-Length": str(len(CHAT))}, CHAT[:9]),
        ({"Transfer-Encoding": "chunked"}, b"%x\r\n%b" % (len(CHAT), CHAT[:9])),
    ):
        async with await router.raw() as client:
            client.send("POST /v1/chat/completions", framing, begun)
            status, _, data = await client.response(within=60)
            assert (status, json.loads(data)["error"]["code"]) == (408, "invalid_request")
    assert stub.calls == []


# ---- compression


CODINGS = {
    "gzip": gzip.compress(CHAT),
    "deflate": zlib.compress(CHAT),
    "br": b"\x0b\x02\x80{}\x03",  # of "{}"
    "zstd": b"\x28\xb5\x2f\xfd\x20\x02\x11\x00\x00{}",
    "GZIP, br": gzip.compress(CHAT),
}


async def test_a_compressed_request_is_refused_for_what_it_is(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/rerank"):
        for coding, data in CODINGS.items():
            headers = {"Content-Encoding": coding}
            response = await router.client.post(path, content=data, headers=headers)
            assert response.status_code == 415
            assert response.headers["accept-encoding"] == "identity"
            assert f"Content-Encoding {coding!r}" in response.text
    assert stub.calls == []


async def test_a_body_that_only_says_identity_is_read(router: RunningRouter) -> None:
    headers = {"Content-Encoding": "identity"}
    response = await router.client.post("/v1/chat/completions", content=CHAT, headers=headers)
    assert response.status_code == 200


async def test_answers_are_as_they_say_whatever_a_client_would_take(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    for accepted in ("gzip", "br", "zstd", "gzip, deflate, br, zstd", "*"):
        for streamed in (False, True):
            response = await router.client.post(
                "/v1/chat/completions",
                json=body(stream=streamed),
                headers={"Accept-Encoding": accepted},
            )
            assert response.status_code == 200
            assert "content-encoding" not in response.headers
    assert {call.headers["accept-encoding"] for call in stub.calls} == {"identity"}


async def test_a_backends_compressed_answer_is_never_passed_on_as_if_it_were_plain(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async def compressed(call: Call) -> None:
        kinds = [("Content-Type", "application/json"), ("Content-Encoding", "br")]
        await call.connection.respond(200, gzip.compress(b"{}"), kinds)

    stub.behaviour = compressed
    response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_invalid")


# ---- one after the other


async def test_requests_sent_ahead_are_answered_in_their_order(router: RunningRouter) -> None:
    async with await router.raw() as client:
        for number in range(8):
            if number % 2:
                client.send("GET /healthz")
            else:
                client.post(max_tokens=number + 1)
        for number in range(8):
            status, _, data = await client.response()
            assert (status, b"healthz" in data) == (200, False)
            assert (b'"status":"ok"' in data) is bool(number % 2)


async def test_an_expectation_that_nobody_knows_does_not_hold_the_request_up(
    router: RunningRouter,
) -> None:
    async with await router.raw() as client:
        headers = {"Expect": "a-miracle", "Content-Length": str(len(CHAT))}
        client.send("POST /v1/chat/completions", headers, CHAT)
        assert (await client.response())[0] == 200


async def test_http_1_0_gets_an_answer_without_chunks_and_the_connection_ends(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    data = json.dumps(body(stream=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {router.key}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    async with await router.raw() as client:
        client.writer.write(head.encode() + data + SMUGGLED)
        answer = await client.to_end()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")
    assert answer.count(b"HTTP/1.1 ") == 1  # what came behind it is not answered


# ---- other forms of addresses, other protocols


async def test_a_whole_url_is_answered_as_its_path_and_asked_of_nobody_else(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    async with await router.raw() as client:
        client.send("GET http://169.254.169.254/healthz")
        assert (await client.response())[2] == b'{"status":"ok"}'
        client.post(path="http://elsewhere.example/v1/chat/completions")
        assert (await client.response())[0] == 200
    assert [call.path for call in stub.calls] == ["/v1/chat/completions"]


async def test_what_is_no_address_of_ours_is_not_found_or_refused(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    for target in ("*", "elsewhere.example:443", "//elsewhere.example/x", ""):
        async with await router.raw() as client:
            client.send(f"OPTIONS {target}", {"Connection": "close"})
            assert 400 <= int((await client.to_end())[9:12]) < 500
    assert stub.calls == []


async def test_the_gateways_addresses_speak_no_websocket(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    offer = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for path in ("/v1/chat/completions", "/healthz", "/v1/models", "/api/chat"):
        async with await router.raw() as client:
            client.send(f"GET {path}", offer)
            first = await client.until(b"\r\n", within=60)
        assert int(first[9:12]) >= 200, first
    assert stub.calls == []


# ---- neither learns of the other

SECRETS: dict[str, Any] = {
    "Cookie": "sessionid=client-secret",
    "Proxy-Authorization": "Basic client-secret",
    "X-Api-Key": "client-secret",
    "Api-Key": "client-secret",
    "X-Goog-Api-Key": "client-secret",
    "Forwarded": "for=client-secret",
    "Via": "1.1 client-secret",
    "Keep-Alive": "client-secret",
    "Upgrade-Insecure-Requests": "client-secret",
    "Trailer": "client-secret",
    "TE": "client-secret",
}


async def test_no_backend_gets_a_clients_credentials_cookies_or_hops(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    asked = {
        "/v1/chat/completions": body(),
        "/v1/completions": {"model": "m", "prompt": "Hi"},
        "/v1/responses": {"model": "m", "input": "Hi"},
        "/v1/messages": body(max_tokens=5),
        "/api/chat": body(stream=False),
    }
    for path, document in asked.items():
        data = json.dumps(document).encode()
        headers = SECRETS | {"Content-Length": str(len(data)), "Connection": "X-Drop, close"}
        async with await router.raw() as client:
            client.send(f"POST {path}?api_key=client-secret", headers, data)
            assert (await client.to_end(60)).startswith(b"HTTP/1.1 ")
    assert len(stub.calls) >= len(asked)
    for call in stub.calls:
        assert b"client-secret" not in call.request.raw_head
        assert router.key.encode() not in call.request.raw_head


async def test_no_client_gets_a_backends_address_key_or_headers(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "keyed", models=("keyed",), api_key="sk-of-the-backend")

    headers = [("Set-Cookie", "a=b"), ("Server", "gpu-7.internal"), ("Via", stub.url)]
    statuses = iter((200, 400, 401, 404, 429, 500, 503))

    async def talkative(call: Call) -> None:
        status = next(statuses, 503)
        document = call.document() if status == 200 else {"error": {"message": "No."}}
        await call.json(document, status, headers)

    stub.behaviour = talkative
    for _ in range(7):
        response = await router.chat(model="keyed")
        told = response.text + repr(response.headers.raw)
        for secret in ("sk-of-the-backend", stub.url.removeprefix("http://"), "gpu-7", "a=b"):
            assert secret not in told
    assert next(statuses, None) is None


async def test_no_client_gets_a_backends_key_or_address_in_its_own_words(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    await router.backend(stub, "keyed", models=("keyed",), api_key="sk-of-the-backend")
    address = stub.url.removeprefix("http://")
    cases = [(status, streamed) for status in (400, 404, 422, 501) for streamed in (False, True)]

    async def talkative(call: Call) -> None:
        status, _ = cases[len(stub.calls) - 1]
        told = f"{call.headers['authorization']} is no key at {address}"
        error = {"error": {"message": told, "param": told, "code": status}}
        if call.is_stream:
            await call.start_stream()
            await call.event(error)
        else:
            await call.json(error, status)

    stub.behaviour = talkative
    cases.append((500, False))  # which marks it as failed
    for status, streamed in cases:
        response = await router.chat(model="keyed", stream=streamed)
        assert response.status_code >= 400, status
        assert "is no key at backend" in response.text
        assert "sk-of-the-backend" not in response.text
        assert address not in response.text
    assert len(stub.calls) == len(cases)


async def test_a_backend_that_cannot_be_reached_is_not_named_by_its_address(
    router: RunningRouter,
) -> None:
    await router.backend("http://127.0.0.1:9", "gone", models=("gone",), api_key="sk-gone")
    response = await router.chat(model="gone")
    assert response.status_code in (502, 503)
    assert "127.0.0.1" not in response.text
    assert "sk-gone" not in response.text


async def test_a_body_that_looks_like_a_head_is_not_taken_for_the_next_one(
    router: RunningRouter, stub: OpenAIStub
) -> None:
    other = post("Authorization: Bearer wrong", f"Content-Length: {len(CHAT)}", data=CHAT)
    async with await router.raw() as client:
        key = f"Authorization: Bearer {router.key}"
        client.writer.write(post(key, f"Content-Length: {len(other)}"))
        await until(lambda: bool(router.runtime.serving), 60.0)
        client.writer.write(other)
        assert (await client.response())[0] == 400
        client.writer.write(other)
        assert (await client.response())[0] == 401
    assert not stub.calls


async def test_a_body_is_not_too_large_since_the_one_before_it_was(router: RunningRouter) -> None:
    async with await router.raw() as client:
        for size, status in ((70_000, 413), (100, 404)):
            data = json.dumps({"model": "a" * size}).encode()
            key = f"Authorization: Bearer {router.key}"
            length = f"Content-Length: {len(data)}"
            client.writer.write(post(key, length, data=data, target="/api/show"))
            assert (await client.response())[0] == status
