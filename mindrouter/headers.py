"""What pages believe of requests' headers, and which scripts browsers run on them."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

from csp.constants import UNSAFE_EVAL
from csp.middleware import CSPMiddleware
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.http.response import HttpResponseBase

from accounts.attempts import client_of, is_trusted

#: What only a proxy may say.
_FORWARDED = ("HTTP_X_FORWARDED_FOR", "HTTP_X_FORWARDED_PROTO", "HTTP_X_FORWARDED_HOST")
#: Below these the pages have the theme, whose library (Alpine) compiles what its attributes say.
_THEMED = ("/admin/", "/account/")


class TrustedProxyMiddleware:
    """``REMOTE_ADDR`` is the client's, and the scheme the one that it used, if a trusted proxy says
    so; whatever anybody else says of it is taken away."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        peer = request.META.get("REMOTE_ADDR") or ""
        if is_trusted(peer):
            told = request.META.get("HTTP_X_FORWARDED_FOR", "")
            request.META["REMOTE_ADDR"] = client_of(peer, [told])
        else:
            for name in _FORWARDED:
                request.META.pop(name, None)
        return self._get_response(request)


class NulMiddleware:
    """Refuses addresses and cookies with a NUL: PostgreSQL stores none, so that any question about
    it would fail. (Forms and the API's fields refuse it themselves, and say which it is.)"""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        told = [request.path, *request.COOKIES.values()]
        if not request.path.startswith("/api/"):
            told.append(unquote(request.META["QUERY_STRING"]))
        if any("\0" in one for one in told):
            return HttpResponseBadRequest("An address or a cookie contains NUL.")
        return self._get_response(request)


class PolicyMiddleware(CSPMiddleware):
    """The site's policy; the theme's pages may compile scripts besides."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        if request.path_info.startswith(_THEMED):
            response._csp_update = {"script-src": [UNSAFE_EVAL]}  # type: ignore[attr-defined]  # noqa: SLF001  django-csp's way
        return super().process_response(request, response)
