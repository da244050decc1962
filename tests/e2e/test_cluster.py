"""``make cluster``'s own command: everything of many machines on one, from nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mindrouter.own_servers import MissingError, OwnServers
from tests.e2e.site import Site, running_site
from tests.stubs.engines import Answer, openai_stub

try:
    OwnServers(Path(), 1, "")
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PARTS = {
    "--workers 2": 1,
    "rungateway --listener": 2,
    "runscheduler": 2,
    "runrecorder": 1,
    "mindrouter worker": 1,
    "mindrouter beat": 1,
    "bin/postgres -D": 1,
}
JSON = {"Content-Type": "application/json"}
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where another user may go: PostgreSQL does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-cluster-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def ask(site: Site, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {site.key}"}
    try:
        return httpx.request(method, site.url + path, json=body, headers=headers, timeout=60)
    except httpx.TransportError:
        return httpx.Response(0)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def register(site: Site, url: str) -> bool:
    body = {"name": "a", "base_url": url, "max_concurrent": 2}
    return ask(site, "POST", "/api/admin/backends", body).status_code == httpx.codes.CREATED


def chat(site: Site) -> bool:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    return ask(site, "POST", "/v1/chat/completions", body).status_code == httpx.codes.OK


def recorded(site: Site) -> bool:
    found = ask(site, "GET", "/api/admin/decisions?outcome=completed")
    return found.status_code == httpx.codes.OK and len(found.json()["results"]) >= 1


@pytest.mark.on_request  # half a minute, and more on a busy machine
@pytest.mark.timeout(600)
def test_it_serves_from_its_first_start_records_in_postgresql_and_ends_whole(folder: Path) -> None:
    with (
        openai_stub("m") as stub,
        running_site(folder / "data", command="cluster", DEMO="0") as site,
    ):
        stub.answers["/v1/chat/completions"] = Answer(COMPLETION, headers=JSON)
        site.until("every part runs", lambda: {p: len(site.pids(p)) for p in PARTS} == PARTS, 120)
        site.until("the backend is registered", lambda: register(site, stub.url), 120)
        site.until("its model is found, and served", lambda: chat(site), 120)
        site.until("the record is in the database", lambda: recorded(site), 60)
        assert not (site.data / "db.sqlite3").exists()

        os.killpg(site.process.pid, signal.SIGINT)
        site.process.wait(120)
        assert site.processes() == {}
        assert not any(is_open(site.port + n) for n in (0, 2000, 2001))
