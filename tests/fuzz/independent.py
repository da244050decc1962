"""What the independent reader of HTTP, h11, makes of trailers, which nobody reads here."""

from __future__ import annotations

import h11

_ABOUT_FRAMING = (
    "Only Transfer-Encoding",
    "multiple Transfer-Encoding",
    "bad Content-Length",
    "conflicting Content-Length",
)


def is_of_trailers(error: h11.RemoteProtocolError, *, head_is_read: bool) -> bool:
    """Whether it is only about framing headers behind a body, which say nothing any more."""
    return head_is_read and str(error).startswith(_ABOUT_FRAMING)
