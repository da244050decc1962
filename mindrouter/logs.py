"""Log lines that name the request that they belong to.

The gateway and the pages say which request they serve; every line that is logged meanwhile carries
its id, whichever module or library writes it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextvars import ContextVar

from django.http import HttpRequest, HttpResponse

#: The id of the request that is being served; empty: none is.
request_id: ContextVar[str] = ContextVar("request_id", default="")
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIds(logging.Filter):
    """Gives each line ``request_id`` where there is one, and ``tag`` for lines of text."""

    def filter(self, record: logging.LogRecord) -> bool:
        known = getattr(record, "request_id", "") or request_id.get()
        if known:
            record.request_id = known
        record.tag = f"[{known}] " if known else ""
        return True


class RequestIdMiddleware:
    """Pages and the management API: the client's own id if it sends one, else a new one."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        told = request.headers.get("X-Request-Id", "")
        known = told if CLIENT_REQUEST_ID.fullmatch(told) else os.urandom(16).hex()
        token = request_id.set(known)
        try:
            response = self._get_response(request)
        finally:
            request_id.reset(token)
        response["X-Request-Id"] = known
        return response
