"""The live figures over a WebSocket, for staff who may read them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError
from django.urls import path

from accounts.models import User
from scheduler.pages.overview import READER, figures_html

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
#: How often it is asked whether the reader may still read.
ASK_AGAIN_SECONDS = 10.0
FORBIDDEN = 4403


class OverviewConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]
    """Sends the overview's figures every second, until the reader leaves or may read no more."""

    # Each connection renders from the process's own scheduler; nothing is passed between them.
    channel_layer_alias = None
    _sending: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        if not _is_same_origin(self.scope) or not await _may_read(self.scope["user"].pk):
            await self.close(FORBIDDEN)
            return
        await self.accept()
        self._sending = asyncio.create_task(self._send_figures())

    async def disconnect(self, code: int) -> None:
        if self._sending is not None:
            self._sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending

    async def _send_figures(self) -> None:
        asked = time.monotonic()
        while True:
            if time.monotonic() - asked >= ASK_AGAIN_SECONDS:
                asked = time.monotonic()
                if not await _may_read(self.scope["user"].pk):
                    await self.close(FORBIDDEN)
                    return
            try:
                await self.send(await _shared.html())
            except (DatabaseError, TimeoutError) as error:
                logger.warning("No live figures at the moment: %s", error)
            await asyncio.sleep(EVERY_SECONDS)


class _Shared:
    """The figures once a second, however many look on."""

    def __init__(self) -> None:
        self._html = ""
        self._made_at = float("-inf")
        self._making: asyncio.Task[str] | None = None

    async def html(self) -> str:
        if time.monotonic() - self._made_at < EVERY_SECONDS / 2:
            return self._html
        making = self._making
        if making is None or making.done() or making.get_loop() is not asyncio.get_running_loop():
            making = self._making = asyncio.create_task(self._make())
        return await asyncio.shield(making)  # who leaves does not end it for the others

    async def _make(self) -> str:
        self._html = await database_sync_to_async(figures_html)()
        self._made_at = time.monotonic()
        return self._html


_shared = _Shared()


@database_sync_to_async  # type: ignore[untyped-decorator]
def _may_read(user_id: int | None) -> bool:
    if user_id is None:  # nobody has signed in
        return False
    user = User.objects.filter(pk=user_id, is_active=True, is_staff=True).first()
    return user is not None and user.has_perm(READER)


def _is_same_origin(scope: dict[str, Any]) -> bool:
    """Another site's page in the reader's browser would be let in by the reader's cookie."""
    headers = dict(scope["headers"])
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    return origin is None or urlsplit(origin.decode("latin-1")).netloc.encode("latin-1") == host


routes = [path("admin/live/", OverviewConsumer.as_asgi())]
