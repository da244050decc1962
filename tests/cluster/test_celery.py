"""Beats and workers over Redis: one beat sends, however many there are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis as client
from channels_redis.pubsub import RedisPubSubChannelLayer
from django.conf import settings

from tests.scheduler.redis import RedisServer

QUEUE = "celery"


@contextmanager
def beat(redis: RedisServer, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "celery", "-A", "mindrouter", "beat", "--pidfile="]
    environment = os.environ | {"MINDROUTER_DATA": str(folder), "REDIS_URL": redis.url}
    process = subprocess.Popen(
        [*command, "--loglevel", "WARNING"], cwd=settings.BASE_DIR, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Queue:
    """What the beats have put into the queue, which no worker empties."""

    def __init__(self, redis: RedisServer) -> None:
        self._client = client.Redis.from_url(redis.url)

    def senders(self, count: int) -> list[int]:
        """Wait for so many messages, take them, and say which process sent each."""
        end = time.monotonic() + 60
        while self._length() < count:
            assert time.monotonic() < end, f"{self._length()} messages, not {count}"
            time.sleep(0.05)
        taken = [json.loads(self._client.rpop(QUEUE)) for _ in range(self._length())]  # type: ignore[arg-type]
        assert all(message["headers"]["expires"] for message in taken)
        return [int(m["headers"]["origin"].removeprefix("gen").split("@")[0]) for m in taken]

    def _length(self) -> int:
        try:
            return int(self._client.llen(QUEUE))  # type: ignore[arg-type]
        except client.ConnectionError:
            return 0


def test_of_two_beats_one_sends_and_the_other_takes_over_when_it_dies(
    redis: RedisServer, tmp_path: Path
) -> None:
    queue = Queue(redis)
    with ExitStack() as stack:
        beats = {
            process.pid: process
            for process in [stack.enter_context(beat(redis, tmp_path)) for _ in range(2)]
        }
        [sender] = set(queue.senders(4))

        beats.pop(sender).kill()
        queue.senders(1)
        [heir] = beats
        assert set(queue.senders(2)) == {heir}

        redis.kill()  # and with it the lock
        redis.start()
        assert set(queue.senders(2)) == {heir}

        beats[heir].send_signal(signal.SIGTERM)
        beats[heir].wait(60)
        assert client.Redis.from_url(redis.url).get("mindrouter:beat") is None


async def test_channels_reach_other_processes(redis: RedisServer) -> None:
    here, there = (RedisPubSubChannelLayer(hosts=[redis.url]) for _ in range(2))
    channel = await here.new_channel()
    await here.group_add("all", channel)
    await there.group_send("all", {"type": "news"})
    async with asyncio.timeout(60):
        assert await here.receive(channel) == {"type": "news"}
    await here.flush()
    await there.flush()


def test_every_task_of_the_schedule_expires_before_the_one_after_the_next() -> None:
    """So that a worker that comes back does not do the same again and again."""
    for entry in settings.CELERY_BEAT_SCHEDULE.values():
        assert entry["options"]["expires"] <= 2 * entry["schedule"]
