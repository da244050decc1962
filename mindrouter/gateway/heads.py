"""Heads of requests."""

from __future__ import annotations


class Head:
    """The request line and the headers, as (lower-case name, value); ``headers`` has the last of
    each name.

    Never changed once it is made, as all requests that begin alike share it.
    """

    __slots__ = ("headers", "key_digest", "lines", "method", "path")

    def __init__(self, method: str, path: str, lines: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.path = path
        self.lines = lines
        self.headers = dict(lines)
        self.key_digest: str | None = None  # of its API key; worked out once, by who needs it

    def header(self, name: bytes) -> str | None:
        """A header's value, stripped; names are lower-case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()
