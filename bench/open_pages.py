"""People who have the admin's pages open: each signs in and lets them ask as a browser does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import httpx

#: What is asked, and how often, in seconds: as the templates say, and ``consumers.py`` for the
#: first, which a browser gets over a WebSocket.
ASKED = {
    "/admin/figures/": 1.0,
    "/admin/groups/figures/": 2.0,
    "/admin/queue/rows/": 2.0,
    "/admin/charts/?hours=24": 60.0,
}
#: And somebody looks around.
VISITED = ("/admin/", "/admin/groups/", "/admin/queue/", "/admin/scheduler/decision/")
VISIT_SECONDS = 3.0


class OpenPages:
    """While it is entered the pages are open; ``count`` is how many answers they have had."""

    def __init__(self, port: int, username: str, password: str, readers: int) -> None:
        self._site = f"http://127.0.0.1:{port}"
        self._account = {"username": username, "password": password}
        self._readers = readers
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[httpx.AsyncClient] = []
        self.count = 0
        self.wrong: list[str] = []

    async def __aenter__(self) -> Self:
        for _ in range(self._readers):
            client = httpx.AsyncClient(base_url=self._site, timeout=30.0)
            self._clients.append(client)
            await client.get("/admin/login/")
            token = client.cookies["csrftoken"]
            form = {**self._account, "csrfmiddlewaretoken": token, "next": "/admin/"}
            answer = await client.post("/admin/login/", data=form)
            if answer.status_code != 302:
                raise RuntimeError(f"not signed in: {answer.status_code} {answer.text[:300]}")
            self._tasks += [
                asyncio.create_task(self._keep_asking(client, (path,), seconds))
                for path, seconds in ASKED.items()
            ]
            self._tasks.append(
                asyncio.create_task(self._keep_asking(client, VISITED, VISIT_SECONDS))
            )
        return self

    async def _keep_asking(
        self, client: httpx.AsyncClient, paths: tuple[str, ...], seconds: float
    ) -> None:
        while True:
            for path in paths:
                answer = await client.get(path)
                self.count += 1
                if answer.status_code not in (200, 204):
                    self.wrong.append(f"{path} answers {answer.status_code}")
                await asyncio.sleep(seconds)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for client in self._clients:
            await client.aclose()
