"""The router itself, serving real connections in a test's own event loop."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from django.db import connections
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from accounts import attempts
from accounts.attempts import FailedAttempts
from accounts.models import Group
from mindrouter.gateway.protocol import GatewayProtocol
from mindrouter.server import configuration
from scheduler.bus.gateway import RemoteRuntime
from scheduler.bus.leader import SchedulerProcess
from scheduler.loading import load
from scheduler.models import Decision
from scheduler.runtime import Runtime
from scheduler.snapshot import Snapshot, load_snapshot
from tests.factories import make_api_key, make_backend, make_user
from tests.stubs.openai_stub import OpenAIStub

T = TypeVar("T")
#: Seconds in which what is waited for has come on any machine that is not broken.
LONG = 60.0
HELLO = [{"role": "user", "content": "Hello"}]
#: Made once: httpx would load the system's certificates for each client.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class DatabaseThread:
    """Asks the database, over one connection: to open one takes as long as ten questions."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="test-database")

    async def ask(self, question: Callable[..., T], *args: Any, **fields: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: question(*args, **fields))

    async def close(self) -> None:
        await self.ask(connections.close_all)  # its own
        self._thread.shutdown(wait=False)


def _make_user(username: str, *, weight: Any = 1, **limits: Any) -> str:
    fields = {"scheduler_weight": weight, **limits}  # a migration makes some groups
    group, _ = Group.objects.update_or_create(name=username, defaults=fields)
    return make_api_key(make_user(username, group=group))


class RunningRouter:
    """A router with an empty database: tests make backends and users, then send requests.

    `client` is an httpx client of the user "ada"; `key` is her key. `scheduling` is `runtime`
    itself, or in a cluster the scheduler at the other end of the bus.
    """

    def __init__(
        self, runtime: Any, scheduling: Runtime, spool: Path, database: DatabaseThread
    ) -> None:
        self.runtime = runtime
        self.scheduling = scheduling
        self.key = ""
        self.port = 0
        self.client: httpx.AsyncClient
        self._spool = spool
        self._database = database
        self._state = ServerState()
        self._server: asyncio.Server

    @classmethod
    async def start(
        cls,
        spool: Path,
        protocol: type[HttpToolsProtocol] = GatewayProtocol,
        *,
        cluster: bool = False,
    ) -> Self:
        """``cluster``: a scheduler and a gateway that speak over the Redis of the settings."""
        database = DatabaseThread()
        key = await database.ask(_make_user, "ada")
        scheduling = await (SchedulerProcess if cluster else Runtime).start()
        serving = await RemoteRuntime.start() if cluster else scheduling
        router = cls(serving, scheduling, spool, database)
        attempts.failed = FailedAttempts()  # as in a new process
        config = configuration("127.0.0.1", 0)
        config.load()
        loop = asyncio.get_running_loop()
        router._server = await loop.create_server(
            lambda: protocol(config, router._state, {}), "127.0.0.1", 0, backlog=4096
        )
        router.port = router._server.sockets[0].getsockname()[1]
        router.key = key
        router.client = router.client_of(key)
        return router

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        await self.client.aclose()
        self._server.close()
        for one in list(self._state.connections):
            one.transport.abort()
        await asyncio.gather(*self._state.tasks)
        await self.runtime.stop()
        if self.in_cluster:
            await self.scheduling.stop()
        await self._database.close()

    @property
    def in_cluster(self) -> bool:
        return self.runtime is not self.scheduling

    # ---- configuration

    async def ask(self, question: Callable[..., T], *args: Any, **fields: Any) -> T:
        """Call a function in a thread that has the database."""
        return await self._database.ask(question, *args, **fields)

    async def change(self, change: Callable[..., T], *args: Any, **fields: Any) -> T:
        """The same, and have what changed in force on return."""

        def changed() -> tuple[T, Snapshot]:
            return change(*args, **fields), load_snapshot()

        result, snapshot = await self.ask(changed)
        await self._adopt(snapshot)
        return result

    async def reload(self) -> None:
        await self._adopt(await self.ask(load_snapshot))

    async def _adopt(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        for one in {self.runtime, self.scheduling}:
            one._adopt(snapshot, now)
        self.scheduling._pump(now)
        await self.scheduling._learn_budgets()

    async def user(self, username: str, *, weight: Any = 1, **limits: Any) -> str:
        """A user alone in a group of that name and weight; returns a key."""
        return await self.change(_make_user, username, weight=weight, **limits)

    async def backend(
        self, stub: OpenAIStub | str, name: str = "", *, models: tuple[str, ...] = (), **fields: Any
    ) -> int:
        """Register a stub, or whatever is at a URL, with 4 slots; returns its number."""
        if isinstance(stub, OpenAIStub):
            models, stub = models or stub.models, stub.url
        fields = {"engine": "vllm", "max_concurrent": 4, "max_queue": 16} | fields
        row = await self.change(
            make_backend, name, models=models or ("m",), base_url=stub, **fields
        )
        return row.pk

    # ---- requests

    def client_of(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
            verify=NO_TLS,
            limits=httpx.Limits(max_connections=None),
        )

    async def chat(self, *, key: str = "", **fields: Any) -> httpx.Response:
        """An ordinary request; a stream is read to its end."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/chat/completions", json=body(**fields), headers=headers)

    async def raw(self) -> RawClient:
        return RawClient(*await asyncio.open_connection("127.0.0.1", self.port), self.key)

    # ---- what is known afterwards

    async def idle(self, within: float = 20.0) -> None:
        """Wait until no request is being served, and the scheduler knows it."""
        async with asyncio.timeout(within):
            while self.runtime.serving:
                await asyncio.wait(set(self.runtime.serving))
            await self.told()

    async def told(self) -> None:
        """Wait until the scheduler knows all that has happened so far."""
        await self.runtime.use_of([])  # a question comes after what was said before

    async def until_waiting(self, count: int, within: float = 20.0) -> None:
        await until(lambda: self.waiting == count, within)

    @property
    def waiting(self) -> int:
        return self.scheduling.scheduler.stats(time.monotonic()).queue_total

    @property
    def in_flight(self) -> int:
        return sum(b.in_flight for b in self.scheduling.scheduler.backend_states(time.monotonic()))

    def left_over(self) -> list[str]:
        """Whatever is held, reserved or counted for requests; nothing once none is served."""
        claims = {*self.runtime._claims, *self.scheduling._claims}
        found = [f"claim {number}" for number in claims]
        units = self.scheduling.scheduler._roster.units.values()
        found += [f"{unit.held} tokens held for {unit.key}" for unit in units if unit.held]
        for meter in self.scheduling.admission.ledger._meters.values():
            if meter.running or meter.waiting:
                found.append(f"{meter.running} running, {meter.waiting} waiting: {meter.holder}")
            if meter.budget is not None and abs(meter.budget.reserved) > 1e-6:
                found.append(f"{meter.budget.reserved} tokens reserved for {meter.holder}")
        return found

    def state_of(self, backend_id: int) -> str:
        states = self.scheduling.scheduler.backend_states(time.monotonic())
        return next(b.state for b in states if b.id == backend_id)

    async def records(self) -> list[Decision]:
        """Every record so far, in the order of arrival."""
        await self.idle()
        return await self.ask(self._load_records)

    async def record(self) -> Decision:
        """The one record there is."""
        records = await self.records()
        assert len(records) == 1, records
        return records[0]

    def spooled_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._spool.iterdir())

    def _load_records(self) -> list[Decision]:
        load(self._spool)
        return list(Decision.objects.order_by("arrived_at", "id"))


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    """Wait for something that tells nobody when it happens."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def body(**fields: Any) -> dict[str, Any]:
    """An ordinary chat request."""
    return {"model": "m", "messages": HELLO} | fields


def events(text: str) -> list[Any]:
    """The documents of a stream's events, without [DONE]."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def said(text: str) -> str:
    """The words of a chat stream."""
    choices = [event["choices"] for event in events(text) if "choices" in event]
    return "".join(c[0]["delta"].get("content") or "" for c in choices if c)


class RawClient:
    """A client that may misbehave in ways that no HTTP library would."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.key = key

    def post(
        self, document: Any = None, *, path: str = "/v1/chat/completions", **fields: Any
    ) -> None:
        """Write a whole request."""
        data = json.dumps(body(**fields) if document is None else document).encode()
        self.send(f"POST {path}", {"Content-Length": str(len(data))}, data)

    def send(self, line: str, headers: dict[str, str] | None = None, data: bytes = b"") -> None:
        fields = {"Host": "x", "Authorization": f"Bearer {self.key}"} | (headers or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"{line} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data)

    async def until(self, text: bytes, within: float = LONG) -> bytes:
        """Everything up to and with `text`."""
        async with asyncio.timeout(within):
            return await self.reader.readuntil(text)

    async def response(self, within: float = LONG) -> tuple[int, dict[str, str], bytes]:
        """A response that has a length."""
        head = (await self.until(b"\r\n\r\n", within)).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        async with asyncio.timeout(within):
            data = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split(" ")[1]), headers, data

    async def response_or_stream(self, within: float) -> bytes:
        """A response of either kind, head and all."""
        head = await self.until(b"\r\n\r\n", within)
        lower = head.lower()
        if b"transfer-encoding: chunked" not in lower:
            length = re.search(rb"content-length: (\d+)", lower)
            async with asyncio.timeout(within):
                return head + await self.reader.readexactly(int(length[1]) if length else 0)
        return head + await self.until(b"0\r\n\r\n", within)

    async def to_end(self, within: float = LONG) -> bytes:
        """Everything until the connection ends, in whatever way."""
        received = bytearray()
        async with asyncio.timeout(within):
            while True:
                try:
                    data = await self.reader.read(65536)
                except ConnectionError:
                    return bytes(received)
                if not data:
                    return bytes(received)
                received += data

    def close(self) -> None:
        """FIN."""
        self.writer.close()

    def reset(self) -> None:
        """RST."""
        if self.writer.transport.is_closing():
            return
        sock = self.writer.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def running_router(
    spool: Path,
    protocol: type[HttpToolsProtocol] = GatewayProtocol,
    *,
    cluster: bool = False,
) -> AsyncIterator[RunningRouter]:
    """A router; after the test nothing of it may be left running, held or waiting."""
    router = await RunningRouter.start(spool, protocol, cluster=cluster)
    try:
        yield router
        await router.idle()
        assert (router.in_flight, router.waiting) == (0, 0), "slots or jobs are left over"
        assert router.left_over() == [], "something is still held or reserved"
        assert not router.runtime.spool._open, "records were never closed"
    finally:
        await router.close()
