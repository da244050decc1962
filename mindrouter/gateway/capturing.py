"""Requests of a key whose prompts an admin has captured: what came and what went is kept.

Nothing of this exists for any other key: such a request has a client of another class.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from mindrouter.gateway.client import Client, Headers
from scheduler.captures import MOST_BYTES, Captured
from scheduler.serving import Serving
from scheduler.snapshot import Capturing, Key
from scheduler.spool import Record

HEADER = b"x-mindrouter-captured-until"


def capturing(client: Client, runtime: Serving, key: Key, record: Record) -> Client:
    """The client that notes what passes, as long as the key is captured; it is told so."""
    if key.capturing is None or key.capturing.until <= record.arrived_at:
        return client
    until = datetime.fromtimestamp(key.capturing.until, UTC).isoformat(timespec="seconds")
    client.common_headers.append((HEADER, until.replace("+00:00", "Z").encode()))
    return CapturingClient(client, runtime, record)


class CapturingClient(Client):
    """Notes the body that was read and what was handed to the connection, each up to a bound.

    Forms are not noted: they are poured, not read.
    """

    __slots__ = ("_answer", "_answer_bytes", "_record", "_request", "_runtime")

    def __init__(self, client: Client, runtime: Serving, record: Record) -> None:
        connection = client._wire if client._wire is not None else client._asgi  # noqa: SLF001  its own class's
        super().__init__(client.head, connection)
        self.common_headers = client.common_headers
        self._runtime = runtime
        self._record = record
        self._request = b""
        self._answer = bytearray()
        self._answer_bytes = 0

    async def read_body(self, limit: int) -> bytes:
        self._request = body = await super().read_body(limit)
        return body

    def _note(self, data: bytes) -> None:
        if not self.left:
            self._answer_bytes += len(data)
            self._answer += data[: MOST_BYTES - len(self._answer)]

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._note(body)
        await super().respond(status, headers, body)

    async def _write(self, data: bytes) -> None:
        await super()._write(data)
        self._note(data)

    @property
    def write_now(self) -> Callable[[bytes], bool]:
        write = super().write_now

        def noted(data: bytes) -> bool:
            if not write(data):
                return False
            self._note(data)
            return True

        return noted

    async def _end(self, last: bytes) -> None:
        self._note(last)
        await super()._end(last)

    def unwatch(self) -> None:
        """The request has been served. It is stored if the key is captured still."""
        super().unwatch()
        now = time.time()
        key = self._runtime.snapshot.keys.get(self.head.key_digest or "")
        if key is not None and key.capturing is not None and now < key.capturing.until:
            self._runtime.captures.put(self._captured(key.key_id, now, key.capturing))

    def _captured(self, key_id: int, now: float, capturing: Capturing) -> Captured:
        return Captured(
            request_id=self._record.request_id,
            key_id=key_id,
            at=now,
            delete_at=now + capturing.kept,
            request=self._request[:MOST_BYTES],
            request_bytes=len(self._request),
            answer=bytes(self._answer),
            answer_bytes=self._answer_bytes,
        )
