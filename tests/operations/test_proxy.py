"""``deploy/proxy/nginx.conf`` in a real nginx, before a real router."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from django.conf import settings as django_settings
from django.test import Client

from tests.backends.test_upstream_tls import Certificate
from tests.factories import make_admin
from tests.running import RunningRouter, until
from tests.stubs.openai_stub import Call, OpenAIStub, either

CONF = Path(__file__).parents[2] / "deploy" / "proxy" / "nginx.conf"


@pytest.fixture
async def proxy(
    router: RunningRouter, settings: Any, tmp_path: Path
) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """nginx with the example, its ports and certificate replaced; (address, what to trust)."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("needs nginx (apt-get install nginx-light)")
    settings.TRUSTED_PROXIES = ["127.0.0.1"]
    certificate = Certificate(tmp_path)
    port = _free_port()
    text = CONF.read_text()
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("server 127.0.0.1:8000", f"server 127.0.0.1:{router.port}"),
        ("/etc/ssl/llm.uni.example.pem", str(certificate.path)),
        ("/etc/ssl/llm.uni.example.key", str(certificate.path)),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "site.conf").write_text(text)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;\n"
        "events {}\n"
        f"http {{ access_log off; {_temporary(tmp_path)} include {tmp_path}/site.conf; }}\n"
    )
    process = await asyncio.create_subprocess_exec(
        nginx, "-c", tmp_path / "nginx.conf", "-p", tmp_path,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await until(lambda: _listens(port) or process.returncode is not None, 60)
        assert process.returncode is None, (tmp_path / "error.log").read_text()
        yield f"https://127.0.0.1:{port}", certificate.client
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


def _temporary(folder: Path) -> str:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def client_of(
    proxy: tuple[str, ssl.SSLContext], key: str, address: str = "127.0.0.1"
) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(verify=proxy[1], local_address=address)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=proxy[0], headers=headers, transport=transport, timeout=60)


async def test_each_event_of_a_stream_passes_at_once(
    router: RunningRouter, stub: OpenAIStub, backend: int, proxy: tuple[str, ssl.SSLContext]
) -> None:
    until_seen = asyncio.Event()

    async def half(call: Call) -> None:
        await call.start_stream()
        await call.say("first")
        await either(until_seen, call.connection.gone)
        await call.finish()
        await call.end()

    stub.behaviour = half
    async with client_of(proxy, router.key) as client:
        document = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        async with client.stream("POST", "/v1/chat/completions", json=document) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if line.startswith("data: "):  # and the backend is still held
                    break
            until_seen.set()
            rest = [line async for line in lines]
    assert "data: [DONE]" in rest


async def test_wrong_keys_are_counted_by_the_clients_own_address(
    router: RunningRouter, settings: Any, proxy: tuple[str, ssl.SSLContext]
) -> None:
    settings.FAILED_KEYS_PER_MINUTE = 2
    async with client_of(proxy, "mr-wrong", "127.0.0.2") as bad:
        bad.headers["X-Forwarded-For"] = "127.0.0.3"  # it says it is somebody else
        statuses = [(await bad.get("/v1/models")).status_code for _ in range(4)]
        assert 429 in statuses, statuses
    async with client_of(proxy, "mr-wrong", "127.0.0.3") as other:
        assert (await other.get("/v1/models")).status_code == 401


async def test_the_overview_lives_over_a_websocket(
    router: RunningRouter, proxy: tuple[str, ssl.SSLContext]
) -> None:
    def signed_in() -> str:
        browser = Client()
        browser.force_login(make_admin("root"), "accounts.authentication.RoleBackend")
        return browser.cookies[django_settings.SESSION_COOKIE_NAME].value

    session = await router.ask(signed_in)
    address = re.sub("^https", "wss", proxy[0])
    async with websockets.connect(
        f"{address}/admin/live/",
        ssl=proxy[1],
        origin=proxy[0],  # type: ignore[arg-type]
        additional_headers={"Cookie": f"{django_settings.SESSION_COOKIE_NAME}={session}"},
        proxy=None,
    ) as connection:
        async with asyncio.timeout(60):
            assert "overview-cards" in str(await connection.recv())
