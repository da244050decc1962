"""What the gateway answers when it cannot serve, before any dialect gives it a form."""

from __future__ import annotations

#: error code -> HTTP status
STATUS_OF_CODE: dict[str, int] = {
    "invalid_request": 400,
    "invalid_api_key": 401,
    "permission_denied": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "capability_missing": 400,
    "context_length_exceeded": 400,
    "body_too_large": 413,
    "rate_limit_exceeded": 429,
    "concurrency_limit_exceeded": 429,
    "quota_exceeded": 429,
    "queue_full": 429,
    "queue_timeout": 503,
    "client_disconnected": 499,
    "upstream_connect_failed": 502,
    "upstream_timeout": 504,
    "upstream_stalled": 504,
    "upstream_ended_early": 502,
    "upstream_error": 502,
    "upstream_invalid": 502,
    "no_backend_available": 503,
    "shutting_down": 503,
    "internal_error": 500,
}
#: Codes that the same request would meet again, or that it is not to be sent again after.
HOPELESS = frozenset(
    {"invalid_request", "permission_denied", "capability_missing", "context_length_exceeded"}
)


#: What is written down of an error in a backend's own words: many quote the prompt.
NOT_KEPT = "A backend said why in its own words, which are not kept: they may quote the request."


class GatewayError(Exception):
    """A request that is answered with an error. ``retry_after`` is in whole seconds.

    ``quoted``: the message is a backend's own, which its client is told and no record keeps.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        hopeless: bool = False,
        quoted: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.quoted = quoted
        self.param = param
        self.status = status or STATUS_OF_CODE[code]
        self.retry_after = retry_after
        self.headers = headers
        self.retry_is_hopeless = hopeless or code in HOPELESS

    @property
    def kept(self) -> str:
        """The message as it is written down."""
        return NOT_KEPT if self.quoted else self.message
