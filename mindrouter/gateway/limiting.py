"""Limits as clients are told of them."""

from __future__ import annotations

import math

from mindrouter.gateway.client import Headers
from mindrouter.gateway.errors import GatewayError
from scheduler.core.errors import SchedulerError
from scheduler.serving import Limited


def headers(limited: Limited) -> Headers:
    """``x-ratelimit-*``: limit, what is left of it, and seconds until all of it is free again."""
    found: Headers = []
    for what, standing in ((b"requests", limited.requests), (b"tokens", limited.tokens)):
        if standing is not None:
            found += [
                (b"x-ratelimit-limit-" + what, b"%d" % standing.limit),
                (b"x-ratelimit-remaining-" + what, b"%d" % standing.remaining),
                (b"x-ratelimit-reset-" + what, b"%ds" % math.ceil(standing.reset_seconds)),
            ]
    return found


def error_of(error: SchedulerError) -> GatewayError:
    """The scheduler's refusal as the client's error."""
    return GatewayError(
        error.reason, error.message, retry_after=error.retry_after, hopeless=error.hopeless
    )
