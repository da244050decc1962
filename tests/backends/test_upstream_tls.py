"""The same over TLS."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from backends.engines.replies import Question
from backends.fetch import UnansweredError, ask, new_client
from backends.tls import tls_context
from backends.upstream import ConnectFailed, EndedEarly, Upstream
from tests.backends.conftest import Client, until_still
from tests.stubs.scripted import ScriptedStub, StubConnection, chunk


class Certificate:
    """A self-signed certificate for `localhost` and 127.0.0.1, and its two contexts."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = dt.datetime.now(dt.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.path = folder / "server.pem"
        self.path.write_bytes(
            pem
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(self.path)
        self.client = ssl.create_default_context(cadata=pem.decode())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def client(certificate: Certificate):  # type: ignore[no-untyped-def]
    client = Client(Upstream(ssl_context=certificate.client))
    yield client
    await client.pool.close()


async def hello(conn: StubConnection) -> None:
    async for request in conn:
        await conn.stream([b"hello ", b"%d" % len(request.body)])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_requests_over_tls_are_answered_and_share_a_connection(
    client: Client, certificate: Certificate, host: str
) -> None:
    async with await ScriptedStub.start(hello, tls=certificate.server) as stub:
        url = f"https://{host}:{stub.port}/v1"
        for size in (2, 5_000_000):
            response = await client.send(url, body=b"x" * size)
            assert await response.read_all(100) == b"hello %d" % size
        assert len(stub.connections) == 1
        assert client.idle(url) == 1


async def test_an_unknown_certificate_is_a_failed_connect(certificate: Certificate) -> None:
    client = Client(Upstream())
    async with await ScriptedStub.start(hello, tls=certificate.server) as stub:
        with pytest.raises(ConnectFailed):
            await client.send(stub.url)
        await client.until_open(stub.url, 0)
    await client.pool.close()


async def test_an_own_authority_is_believed_by_the_relay_and_by_polls(
    certificate: Certificate, settings: Any
) -> None:
    settings.BACKEND_CA_FILE = str(certificate.path)
    tls_context.cache_clear()
    client = Client(Upstream())
    try:
        async with await ScriptedStub.start(hello, tls=certificate.server) as stub:
            assert await (await client.send(stub.url)).read_all(100) == b"hello 2"
            async with new_client(connect_timeout=5) as polls:
                base = f"https://localhost:{stub.port}"
                assert (await ask(polls, base, Question("/health"))).status == 200
    finally:
        tls_context.cache_clear()
        await client.pool.close()


async def test_polls_do_not_believe_an_unknown_certificate(certificate: Certificate) -> None:
    async with (
        await ScriptedStub.start(hello, tls=certificate.server) as stub,
        new_client(connect_timeout=5) as polls,
    ):
        with pytest.raises(UnansweredError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(polls, f"https://localhost:{stub.port}", Question("/health"))


async def test_verification_can_be_switched_off(certificate: Certificate) -> None:
    client = Client(Upstream(verify_tls=False))
    async with await ScriptedStub.start(hello, tls=certificate.server) as stub:
        assert await (await client.send(stub.url)).read_all(100) == b"hello 2"
    await client.pool.close()


async def test_a_certificate_for_another_name_is_a_failed_connect(
    client: Client, certificate: Certificate
) -> None:
    async with await ScriptedStub.start(hello, host="127.0.0.2", tls=certificate.server) as stub:
        with pytest.raises(ConnectFailed):
            await client.send(stub.url)
        await client.until_open(stub.url, 0)


async def test_a_server_without_tls_is_a_failed_connect(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await ScriptedStub.start(script) as stub:
        url = stub.url.replace("http:", "https:")
        with pytest.raises(ConnectFailed):
            await client.send(url)
        await client.until_open(url, 0)


async def test_the_connect_limit_covers_the_handshake(client: Client) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.stall()

    async with await ScriptedStub.start(script) as stub:
        url = stub.url.replace("http:", "https:")
        with pytest.raises(ConnectFailed):
            await client.send(url, connect=0.1)
        await client.until_open(url, 0)
        await stub.until_open(0)


async def test_cancelling_at_any_turn_of_a_handshake_leaks_nothing(
    client: Client, certificate: Certificate
) -> None:
    async with await ScriptedStub.start(hello, tls=certificate.server) as stub:
        for turns in range(40):
            tasks = [asyncio.create_task(client.send(stub.url)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await client.until_open(stub.url, client.idle(stub.url))
        assert await (await client.send(stub.url)).read_all(100) == b"hello 2"
        idle = client.pool._idle[f"https://127.0.0.1:{stub.port}"]
        for connection in tuple(idle):
            connection.abort()
        await client.until_open(stub.url, 0)
        await stub.until_open(0)


async def test_a_cut_stream_over_tls_is_an_early_end(
    client: Client, certificate: Certificate
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.start_chunked()
        await conn.write(chunk(b"some"))

    async with await ScriptedStub.start(script, tls=certificate.server) as stub:
        response = await client.send(stub.url)
        assert await response.read() == b"some"
        with pytest.raises(EndedEarly):
            await response.read()


async def test_a_slow_reader_over_tls_holds_the_server_back(
    client: Client, certificate: Certificate
) -> None:
    sent = 0

    async def script(conn: StubConnection) -> None:
        nonlocal sent
        await conn.read_request()
        await conn.start_chunked()
        while sent < 64 << 20:
            await conn.chunk(b"x" * 65536)
            sent += 65536
        await conn.end_chunked()

    async with await ScriptedStub.start(script, tls=certificate.server) as stub:
        with await client.send(stub.url) as response:
            assert await until_still(lambda: sent) < 32 << 20
            assert len(await response.read_all(64 << 20)) == 64 << 20


async def test_a_body_without_length_ends_with_the_tls_connection(
    client: Client, certificate: Certificate
) -> None:
    async def script(conn: StubConnection) -> None:
        await conn.read_request()
        await conn.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")

    async with await ScriptedStub.start(script, tls=certificate.server) as stub:
        assert await (await client.send(stub.url)).read_all(100) == b"until the end"
