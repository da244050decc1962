"""Cuts a stream's bytes into its events."""

from __future__ import annotations

from mindrouter.gateway.dialects.translation import invalid_answer
from mindrouter.gateway.events import BYTE_ORDER_MARK


class Splitter:
    """Cuts bytes into whole server-sent events, or with ``end`` into whole lines."""

    #: More than this without an end is no stream that anybody could read.
    MAX_BYTES = 32 << 20

    def __init__(self, end: bytes = b"\n\n") -> None:
        self._end = end
        self._rest = b""
        self._begun = False
        self._after_return = False  # the last byte was a \r: a \n that follows ends no line more

    def events(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with its end. Raises: GatewayError."""
        if self._end == b"\n\n" and (self._after_return or b"\r" in data):
            data = self._with_plain_ends(data)
        parts = (self._rest + data).split(self._end)
        self._rest = parts.pop()
        if len(self._rest) > self.MAX_BYTES:
            raise invalid_answer("an event without end")
        if parts and not self._begun:
            parts[0] = self._without_mark(parts[0])
        return [part + self._end for part in parts]

    def _with_plain_ends(self, data: bytes) -> bytes:
        """Only engines behind some proxy write other ones; JSON never holds a bare one."""
        if self._after_return and data:
            self._after_return = False
            data = data.removeprefix(b"\n")
        self._after_return = self._after_return or data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def rest(self) -> bytes:
        """What has come since the last whole event."""
        rest, self._rest = self._rest, b""
        return self._without_mark(rest)

    def _without_mark(self, part: bytes) -> bytes:
        """Without the byte order mark that a stream may begin with."""
        begun, self._begun = self._begun, True
        return part if begun else part.removeprefix(BYTE_ORDER_MARK)


def data_of(event: bytes) -> bytes | None:
    """The data lines of an event; None where they say nothing, or it has none, as comments do."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    data = b"\n".join(lines)
    return data if data.strip() else None
