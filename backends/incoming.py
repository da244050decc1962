"""Reading one HTTP/1.1 response out of the bytes of a connection."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any, NamedTuple

import httptools

from backends.opening import Opening
from backends.response import Response

MAX_HEAD_BYTES = 64 * 1024  # also the most bytes in a row that bring no content
MAX_HEADERS = 256
MAX_INTERIM_RESPONSES = 16
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n").match
_FRAMING_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"keep-alive"})


class _Rejected(Exception):  # noqa: N818
    """Raised in a callback of the parser, to stop it."""


class _Head(NamedTuple):
    """What a head said, but for its Content-Length."""

    headers: list[tuple[bytes, bytes]]
    length_at: int  # of them
    idle_seconds: float


class Incoming:
    """Parses the responses of one connection, one after the other, each into a `Response`.

    `between_chunks` while the next byte is the first of a chunk, or of what ends the body.
    `complete` once the end of the present one has come; `keep_alive` then tells whether the
    connection may be used again, and `idle_seconds` for how long the server says it keeps it.
    """

    __slots__ = (
        "_content_length",
        "_expects_body",
        "_fed",
        "_head_done",
        "_headers",
        "_interim",
        "_known",
        "_overhead",
        "_parser",
        "_problem",
        "_response",
        "_transfer_encoding",
        "between_chunks",
        "complete",
        "idle_seconds",
        "keep_alive",
    )

    def __init__(self) -> None:
        self._problem = ""
        self._known: Opening[_Head] | None = None  # how the answer before this one began
        self._parser: Any = httptools.HttpResponseParser(self)

    def begin(self, response: Response, *, expects_body: bool) -> None:
        """Expect a response; `expects_body` is False for the answer to HEAD."""
        self.complete = False
        self.between_chunks = False
        self.keep_alive = False
        self.idle_seconds = math.inf
        self._response = response
        self._expects_body = expects_body
        self._head_done = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._content_length = b""
        self._transfer_encoding = b""
        self._interim = 0
        self._overhead = 0
        self._fed = 0  # bytes, until the head is there

    def feed(self, data: bytes) -> str:
        """Parse some bytes, and return what is wrong with them, or nothing."""
        before = self._response.buffered
        starts = not self._head_done and not self._fed
        if not self._head_done:
            if self._known is not None and starts and self._take_known(data):
                return ""
            self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                return self._problem or str(error) or "not HTTP"
            self.keep_alive = False  # surplus bytes: the response itself is whole
        if self.complete and starts:
            self._remember(data)
        if self.between_chunks and not data.endswith(b"\r\n"):
            self.between_chunks = False  # the next one's size has begun
        if self._response.buffered == before and not self.complete:
            self._overhead += len(data)
            if self._overhead > MAX_HEAD_BYTES:
                return "too many bytes without any content"
        else:
            self._overhead = 0
        return ""

    def _take_known(self, data: bytes) -> bool:
        """Take a whole answer that begins like the one before it, without the parser."""
        known = self._known
        body = known.body_of(data) if known is not None and self._expects_body else None
        if known is None or body is None:
            self._known = None
            return False
        headers = known.head.headers.copy()
        headers[known.head.length_at] = (b"content-length", b"%d" % len(body))
        self.keep_alive = self._head_done = self.complete = True
        self.idle_seconds = known.head.idle_seconds
        response = self._response
        if body:
            response.chunks.append(body)
            response.buffered += len(body)
        response.begin(200, headers)
        return True

    def _remember(self, data: bytes) -> None:
        """An answer came whole, in one read: the next one may begin likewise."""
        response = self._response
        if response.status == 200 and self.keep_alive and self._content_length:
            names = [name for name, _ in response.headers]
            head = _Head(response.headers, names.index(b"content-length"), self.idle_seconds)
            self._known = Opening.of(data, head)

    def whole_chunks(self, data: bytes) -> bytes | None:
        """Return the content of what is whole chunks of the body and nothing else.

        A stream consists of such reads. To be called where `between_chunks`: the parser, which
        then waits for a chunk, need not see them, and takes several times as long.
        """
        if not data.endswith(b"\r\n"):
            return None
        parts = []
        at, length = 0, len(data)
        while at < length:
            size = _CHUNK_SIZE(data, at)
            if size is None:
                return None
            start = size.end()
            end = start + int(size[1], 16)
            at = end + 2
            if start == end or at > length or data[end:at] != b"\r\n":
                return None
            parts.append(data[start:end])
        self._overhead = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def ends_with_connection(self) -> bool:
        """Tell whether the server's closing is the proper end, as no other was announced."""
        return self._head_done and not self._transfer_encoding and not self._content_length

    def release(self) -> None:
        """Let go of the parser, which refers back to this object."""
        self._parser = None

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self.complete:
            self._reject("bytes after the end of the response")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer
        name = name.lower()
        self._headers.append((name, value.rstrip()))
        if name in _FRAMING_HEADERS:
            self._note(name, value)

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        status: int = parser.get_status_code()
        version = parser.get_http_version()
        if version not in ("1.1", "1.0") or not 100 <= status <= 599 or status == 101:
            self._reject(f"HTTP/{version} with status {status}")
        if len(headers) > MAX_HEADERS or (
            self._fed > MAX_HEAD_BYTES and _size(headers) > MAX_HEAD_BYTES
        ):
            self._reject("the response head is too large")
        if status < 200:
            self._skip_interim()
            return
        self.keep_alive = version == "1.1" and parser.should_keep_alive()
        self._head_done = True
        self._response.begin(status, headers)
        if not self._expects_body:
            self.complete = True
            self.keep_alive = False  # the parser does not know, and still waits for a body

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            response = self._response
            response.chunks.append(body)
            response.buffered += len(body)

    def on_chunk_header(self) -> None:
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        if self._head_done:
            self.complete = True

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self._content_length = value
        elif name == b"keep-alive":
            self.idle_seconds = _announced_idle_seconds(value)
        elif self._transfer_encoding or value.strip().lower() != b"chunked":
            self._reject("a transfer coding other than chunked")
        else:
            self._transfer_encoding = value

    def _skip_interim(self) -> None:
        self._interim += 1
        if self._interim > MAX_INTERIM_RESPONSES:
            self._reject("too many interim responses")
        self._content_length = b""
        self._transfer_encoding = b""

    def _reject(self, problem: str) -> None:
        self._problem = problem
        raise _Rejected


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(map(len, chain.from_iterable(headers)))


def _announced_idle_seconds(keep_alive: bytes) -> float:
    """Read how long the server keeps an idle connection, less a margin for the way."""
    found = re.search(rb"timeout=(\d{1,6})", keep_alive)
    if found is None:
        return math.inf
    seconds = int(found[1])
    return seconds - 1.0 if seconds > 1 else seconds / 2
