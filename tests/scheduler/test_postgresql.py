"""The records and configuration side on PostgreSQL, and what happens while it is away."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from scheduler.spool import Record, Spool
from tests.scheduler.postgres import PostgreSQL, find_binaries, postgresql
from tests.stubs.openai_stub import Call, OpenAIStub

try:
    find_binaries()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)

#: Tests that use the database, run again on PostgreSQL.
SAME_TESTS = (
    "tests/scheduler/test_triggers.py",
    "tests/audit/test_records.py",
    "tests/scheduler/test_apply.py",
    "tests/scheduler/test_export.py",
    "tests/scheduler/test_loading.py",
    "tests/scheduler/test_retention.py",
    "tests/scheduler/test_checkpoint.py",
    "tests/scheduler/test_api_decisions.py",
    "tests/scheduler/test_api_stats.py",
    "tests/accounts/test_key_command.py",
    "tests/accounts/test_weight_constraints.py",
    "tests/operations/test_backup.py",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    """With the tables made."""
    with postgresql() as running:
        manage(environment(running, tmp_path_factory.mktemp("data")), "migrate", "-v0")
        yield running


def environment(server: PostgreSQL, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DATABASE_URL": server.url,
        "MINDROUTER_DATA": str(folder),
        "MINDROUTER_TEST_KEEP_URLS": "1",
        "LOG_LEVEL": "WARNING",
    }


@pytest.mark.timeout(300)
def test_the_same_tests_pass_on_postgresql(server: PostgreSQL, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAME_TESTS],
        env=environment(server, tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]


def test_records_appear_soon_after_the_database_is_back(server: PostgreSQL, tmp_path: Path) -> None:
    """The recorder outlives two outages, the first before it ever had a connection."""
    settings = environment(server, tmp_path)
    spool = Spool(tmp_path / "spool")
    server.stop()
    command = [sys.executable, "manage.py", "runrecorder"]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, env=settings, stderr=out) as recorder:
        try:
            for outage in ("first", "second"):
                spool.close(Record(request_id=outage, arrived_at=1.0, outcome="completed"))
                _until_it_waits(log)
                time.sleep(4)  # long enough for the longest pause between attempts
                server.start()
                back = time.monotonic()
                while not _is_stored(server, outage):
                    assert time.monotonic() - back < 10, (
                        "not loaded 10 s after the database was back"
                    )
                    time.sleep(0.1)
                server.stop()
        finally:
            server.start()
            recorder.send_signal(signal.SIGTERM)
            assert recorder.wait(20) == 0
    spool.stop()


def _until_it_waits(log: Path) -> None:
    """Until the recorder has said once more that it cannot reach the database."""
    words, end = b"Records wait in the spool", time.monotonic() + 60
    before = log.read_bytes().count(words)
    while log.read_bytes().count(words) == before:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def _is_stored(server: PostgreSQL, request_id: str) -> bool:
    query = "SELECT outcome FROM scheduler_decision WHERE request_id = %s"
    with psycopg.connect(server.url) as connection:
        return connection.execute(query, [request_id]).fetchone() == ("completed",)


SITE = """
users: [{{username: ada}}, {{username: root, is_staff: true, is_superuser: true}}]
api_keys: [{{user: ada, name: a, key: "{key}"}}]
backends:
  - {{name: a, base_url: "{url}", max_concurrent: {streams}, models: [{{name: m}}]}}
"""
SIGN_IN = """
from django.core.management import call_command
from django.test import Client
from accounts.models import User
call_command("apply", "{path}", stdout=open("/dev/null", "w"))
client = Client()
client.force_login(User.objects.get(username="root"))
print(client.cookies["sessionid"].value)
"""
KEY = "mr-" + "a" * 64
STREAMS, PAGES, POOL_SIZE = 200, 60, 3


async def test_connections_are_as_many_as_the_pool_has_whatever_streams_and_pages_are_open(
    server: PostgreSQL, tmp_path: Path
) -> None:
    over = asyncio.Event()

    async def held(call: Call) -> None:
        await call.start_stream()
        await call.say("Hello")
        await over.wait()
        await call.finish()
        await call.end()

    async with await OpenAIStub.start() as stub:
        stub.behaviour = held
        settings = environment(server, tmp_path) | {"DATABASE_POOL_SIZE": str(POOL_SIZE)}
        site = SITE.format(key=KEY, url=stub.url, streams=STREAMS)
        path = tmp_path / "site.yaml"
        path.write_text(site)
        session = await asyncio.to_thread(
            manage, settings, "shell", "-v0", "-c", SIGN_IN.format(path=path)
        )
        with running_gateway(settings) as url:
            async with httpx.AsyncClient(
                base_url=url, timeout=90, limits=httpx.Limits(max_connections=None)
            ) as client:
                await until_it_serves(client)
                streams = [
                    asyncio.create_task(chat(client), name=f"stream {n}") for n in range(STREAMS)
                ]
                async with asyncio.timeout(60):
                    while len(stub.calls) < STREAMS:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                most = asyncio.create_task(most_connections(server, over))
                cookies = {"Cookie": f"sessionid={session.strip()}"}
                pages = await asyncio.gather(
                    *(client.get("/admin/scheduler/decision/", headers=cookies)
                      for _ in range(PAGES))
                )  # fmt: skip
                over.set()
                texts = await asyncio.gather(*streams)
                assert {page.status_code for page in pages} == {200}
                assert all(text.endswith("data: [DONE]\n\n") for text in texts)
                assert 1 <= await most <= POOL_SIZE


def manage(settings: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "manage.py", *arguments]
    return subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout


@contextmanager
def running_gateway(settings: dict[str, str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "manage.py", "rungateway", "--port", str(port)]
    with subprocess.Popen(command, env=settings) as gateway:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            gateway.kill()


async def until_it_serves(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/healthz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def chat(client: httpx.AsyncClient) -> str:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"Authorization": f"Bearer {KEY}"}
    return (await client.post("/v1/chat/completions", json=body, headers=headers)).text


async def most_connections(server: PostgreSQL, over: asyncio.Event) -> int:
    """The most clients that the database has had at one moment, this one not counted."""
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    most = 0
    async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as connection:
        while not over.is_set():
            row = await (await connection.execute(query)).fetchone()
            assert row is not None
            most = max(most, row[0])
            await asyncio.sleep(0.01)
    return most
