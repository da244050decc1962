"""What streams in any client's own form have in common: how a backend tells of an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mindrouter.gateway.dialects.anthropic.native import MessageEvents
from mindrouter.gateway.dialects.native import NativeStream
from mindrouter.gateway.dialects.responses.native import ResponseEvents
from mindrouter.gateway.surfaces.answers import SurfaceEvents

FORMS: dict[str, Callable[[], NativeStream]] = {
    "messages": partial(MessageEvents, prompt_tokens=9, cached_apart=False),
    "responses": partial(ResponseEvents, prompt_tokens=9),
    "other surfaces": partial(SurfaceEvents, prompt_tokens=9, output_tokens=None),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"message":"ill","code":503}', {"message": "ill", "code": 503}),
        (b"ill", "ill"),
        (b"", "error"),
    ],
)
def test_an_event_that_is_named_error_is_one_in_every_form(
    form: Callable[[], NativeStream], line_end: bytes, data: bytes, told: object
) -> None:
    ping = b'event: ping\ndata: {"message":"event: error"}\n\n'
    failure = b"event: error\ndata: %b\n\n" % data
    stream = form()
    assert stream.feed((ping + failure + ping).replace(b"\n", line_end)) == ping
    assert stream.error == told
    assert stream.over
