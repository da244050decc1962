"""Times in the viewer's zone: the browser says its zone in a cookie (``zone.js``)."""

from __future__ import annotations

from collections.abc import Callable
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import HttpRequest, HttpResponse
from django.utils import timezone

COOKIE = "mindrouter-zone"


class ViewerZoneMiddleware:
    """Until the browser has said its zone, and without scripts, times are in the site's."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        zone = _zone(request.COOKIES.get(COOKIE, ""))
        if zone is None:
            return self._get_response(request)
        with timezone.override(zone):
            return self._get_response(request)


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None
