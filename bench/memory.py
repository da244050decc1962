"""What clients and backends can make the gateway hold in memory, whatever they do.

    .venv/bin/python -m bench.memory [--scale 1]

The real gateway as a process of its own; client and backend are this one. RSS is the gateway's, in
MB by the kernel's count, sampled each 20 ms: what it grew by at most, and what was left of that 2 s
later. ``--scale`` makes answers, streams and queues smaller on a machine that does other things.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MB = 1_000_000
TOKENS = b"x" * 65_000
LIMIT = 600.0


class Bench:
    """A running gateway with one stub behind it."""

    def __init__(self, router: Any, stub: Any, scale: float) -> None:
        self.router, self.stub, self.scale = router, stub, scale

    def rss(self) -> float:
        text = Path(f"/proc/{self.router.process.pid}/statm").read_text()
        return int(text.split()[1]) * resource.getpagesize() / MB

    async def measure(self, what: str, case: Callable[[], Awaitable[int]]) -> None:
        """Run a case, which returns how many things it held at once, and print its line."""
        before = peak = self.rss()

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, self.rss())
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(LIMIT):
            count = await case()
        watching.cancel()
        await asyncio.sleep(2)
        each = f"{(peak - before) * 1000 / count:8.1f} KB each" if count > 1 else ""
        after = self.rss() - before
        print(f"{what:<48} {before:6.0f} + {peak - before:6.1f}, {after:+6.1f} after {each}")

    def count(self, whole: int) -> int:
        return max(1, int(whole * self.scale))

    # ---- cases

    async def answer_to_nobody(self) -> int:
        """The client takes nothing of a large stream."""
        self.stub.then(self._large())
        client = await self.router.raw()
        client.writer.transport.pause_reading()
        client.post(stream=True)
        await self.stub.until_calls(len(self.stub.calls) + 1, LIMIT)
        await asyncio.sleep(3)
        client.reset()
        return 1

    async def answer_to_a_reader(self) -> int:
        self.stub.then(self._large())
        client = await self.router.raw()
        client.post(stream=True)
        await client.until(b"\r\n\r\n", LIMIT)
        while data := await client.reader.read(1 << 20):
            if data.endswith(b"0\r\n\r\n"):
                break
        client.reset()
        return 1

    async def answer_to_a_slow_reader(self) -> int:
        """64 KB each 20 ms, for 3 s."""
        self.stub.then(self._large())
        client = await self.router.raw()
        client.post(stream=True)
        for _ in range(150):
            await client.reader.read(65536)
            await asyncio.sleep(0.02)
        client.reset()
        return 1

    def _large(self) -> Any:
        from tests.stubs.openai_stub import sse

        event = sse({"choices": [{"index": 0, "delta": {"content": TOKENS.decode()}}]})

        async def behave(call: Any) -> None:
            await call.start_stream()
            for _ in range(self.count(200 * MB) // len(event)):
                await call.connection.chunk(event)
            await call.finish()
            await call.end()

        return behave

    async def images(self) -> int:
        from tests.running import HELLO

        image = {"url": "data:image/png;base64," + "A" * self.count(20 * MB)}
        parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": image}]
        body = {"model": "m", "messages": [{**HELLO[0], "content": parts}]}
        data = json.dumps(body).encode()
        post = self.router.client.post
        answers = await asyncio.gather(
            *(post("/v1/chat/completions", content=data, timeout=LIMIT) for _ in range(5))
        )
        if [one.status_code for one in answers] != [200] * 5:
            raise RuntimeError(answers)
        self.stub.calls.clear()
        self.stub.server.requests.clear()
        return 5

    async def idle_streams(self) -> int:
        """Each has had its first words, and nothing more comes."""
        go_on = asyncio.Event()

        async def begins(call: Any) -> None:
            await call.start_stream()
            await call.role()
            await call.say("Hello")
            await go_on.wait()
            call.connection.close()

        return await self._hold(begins, self.count(1000), go_on, b"Hello")

    async def queued_jobs(self) -> int:
        """All wait for the one slot of the model "one"."""
        go_on = asyncio.Event()

        async def waits(call: Any) -> None:
            await go_on.wait()
            call.connection.close()

        return await self._hold(waits, self.count(10_000), go_on, b"", model="one")

    async def _hold(
        self, behaviour: Any, count: int, go_on: asyncio.Event, until: bytes, model: str = "m"
    ) -> int:
        ordinary, self.stub.behaviour = self.stub.behaviour, behaviour
        clients = []
        for _ in range(count):
            clients.append(client := await self.router.raw())
            client.post(stream=True, model=model)
        for client in clients if until else []:
            await client.until(until, LIMIT)
        await asyncio.sleep(2 + count / 2000)
        for client in clients:
            client.reset()
        go_on.set()
        self.stub.behaviour = ordinary
        self.router._raw.clear()  # noqa: SLF001
        return count


def make_site(url: str) -> str:
    """Returns a key."""
    from django.core.management import call_command
    from django.db import connection

    from tests.factories import make_api_key, make_backend, make_user

    call_command("migrate", verbosity=0)
    slots = {"base_url": url, "engine": "vllm", "max_queue": 20_000}
    make_backend("a", models=("m",), max_concurrent=5000, **slots)
    make_backend("b", models=("one",), max_concurrent=1, **slots)
    key = make_api_key(make_user("ada"))
    connection.close()
    return key


async def bench(folder: Path, scale: float) -> None:
    from tests.processes import RouterProcess
    from tests.stubs.openai_stub import OpenAIStub

    async with await OpenAIStub.start("m", "one") as stub:
        router = RouterProcess(folder, await asyncio.to_thread(make_site, stub.url))
        try:
            await router.start(QUEUE_KEEPALIVE_AFTER="3600", SCHEDULER_MAX_WAIT="3600")
            one = Bench(router, stub, scale)
            print(f"scale {scale:g}; RSS in MB: at rest + most, left 2 s later")
            await one.measure("200 MB to a client that reads nothing", one.answer_to_nobody)
            await one.measure("200 MB to a slow reader", one.answer_to_a_slow_reader)
            await one.measure("200 MB to a client that reads", one.answer_to_a_reader)
            await one.measure("5 images of 20 MB at once", one.images)
            await one.measure("1,000 idle streams", one.idle_streams)
            for what in ("10,000 queued streams", "the same again", "and again"):
                await one.measure(what, one.queued_jobs)
        finally:
            await router.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the gateway inherits it
    folder = Path(tempfile.mkdtemp(prefix="mindrouter-memory-"))
    os.environ |= {
        "MINDROUTER_DATA": str(folder),
        "DJANGO_SETTINGS_MODULE": "mindrouter.settings",
        "LOG_LEVEL": "ERROR",
    }
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
    import django

    django.setup()
    uvloop.run(bench(folder, arguments.scale))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
