"""``manage.py runscheduler``: the scheduler of all gateways, or a standby of it, until stopped."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import Any

import uvloop
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from scheduler.bus.leader import SchedulerProcess


class Command(BaseCommand):
    help = "Schedule for all gateways on REDIS_URL; of several, one leads and the others stand by."

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.REDIS_URL:
            raise CommandError("Set REDIS_URL: without it the gateway schedules by itself.")
        uvloop.run(_run())


async def _run() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    process = await SchedulerProcess.start()
    gc.collect()
    gc.freeze()
    await stop.wait()
    await process.stop()
