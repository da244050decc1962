"""REDIS_URL in each of its forms: bus, channels and Celery reach the same database."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.conf import settings

from scheduler.bus import redis as places
from scheduler.bus.wire import Line, Wire
from tests.backends.test_upstream_tls import Certificate
from tests.running import until
from tests.scheduler.redis import RedisServer, redis_server

PASSWORD = "a/b:c@d%e"
FORMS = {
    "a port": "redis://:{password}@127.0.0.1:{port}/3",
    "a port and an option": "redis://default:{password}@127.0.0.1:{port}?db=3",
    "a socket": "unix://:{password}@{folder}/socket?db=3",
    "a socket's first database": "unix://:{password}@{folder}/socket",
    "TLS": "rediss://:{password}@localhost:{secure}/3?ssl_ca_certs={folder}/server.pem",
    "TLS with any certificate": "rediss://:{password}@127.0.0.1:{secure}/3?ssl_cert_reqs=none"
    "&ssl_check_hostname=false",
}
#: What Celery makes of the settings; with a task that nobody takes.
SEND = """
from mindrouter.celery import app
with app.connection_for_write() as connection:
    connection.ensure_connection(max_retries=1, timeout=5)
app.send_task("nobody.knows", retry=False)
"""


class Redis(RedisServer):
    """With a password, a socket and a port with TLS; ``url`` is one of ``FORMS``."""

    def __init__(self, program: str, folder: Path) -> None:
        super().__init__(program, folder)
        self.folder = folder
        self.secure = self.port  # until another one is free
        while self.secure == self.port:
            self.secure = RedisServer(program, folder).port
        pem = Certificate(folder).path
        self.options = (
            *("--requirepass", PASSWORD, "--unixsocket", str(folder / "socket")),
            *("--tls-port", str(self.secure), "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(pem), "--tls-key-file", str(pem)),
        )

    def form(self, name: str) -> str:
        return FORMS[name].format(
            password=quote(PASSWORD, safe=""),
            port=self.port,
            secure=self.secure,
            folder=self.folder,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not in the path")
    with redis_server(Redis) as server:
        assert isinstance(server, Redis)
        yield server


def send_a_task(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REDIS_URL": url, "MINDROUTER_DATA": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", SEND],
        cwd=settings.BASE_DIR,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("form", FORMS)
async def test_every_part_reaches_the_same_redis(server: Redis, form: str, tmp_path: Path) -> None:
    url = server.form(form)
    library, line = places.connect(url), Line(url)
    try:
        await line.execute(("FLUSHDB",))
        await line.execute(("SET", "told", "by the bus"))
        assert await library.get("told") == b"by the bus"
        sent = await asyncio.to_thread(send_a_task, url, tmp_path)
        assert sent.returncode == 0, sent.stderr
        assert await line.execute(("LLEN", "celery")) == 1
        here, there = (RedisPubSubChannelLayer(hosts=[url]) for _ in range(2))
        channel = await here.new_channel()
        await here.group_add("all", channel)
        await there.group_send("all", {"type": "news"})
        async with asyncio.timeout(60):
            assert await here.receive(channel) == {"type": "news"}
        await here.flush()
        await there.flush()
    finally:
        line.close()
        await library.aclose()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_of_nobody_known_is_refused_by_every_part(
    server: Redis, host: str, tmp_path: Path
) -> None:
    url = f"rediss://:{quote(PASSWORD, safe='')}@{host}:{server.secure}/0"
    line, library = Line(url), places.connect(url)
    with pytest.raises(places.ERRORS):
        await line.execute(("PING",))
    with pytest.raises(places.ERRORS):
        await library.get("told")
    sent = await asyncio.to_thread(send_a_task, url, tmp_path)
    assert sent.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in sent.stderr
    await library.aclose()


REFUSAL = b"-ERR max number of clients reached\r\n"


@pytest.mark.parametrize("when", ["before a command", "in place of an answer"])
async def test_what_redis_says_when_it_takes_nobody_is_the_error(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if when == "in place of an answer":
            await reader.read(1)
        writer.write(REFUSAL)
        writer.close()

    door = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = door.sockets[0].getsockname()
    try:
        _, wire = await asyncio.get_running_loop().create_connection(Wire, host, port)
        if when == "before a command":
            await until(lambda: bool(wire._end), 60.0)
        with pytest.raises(places.ERRORS, match="max number of clients"):
            await wire.send([("PING",), ("PING",)])
    finally:
        door.close()
    assert not caplog.records
