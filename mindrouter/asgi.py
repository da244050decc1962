"""Where a connection goes: the gateway's addresses to its consumer, the rest to Django.

The gateway is asked first, by a look at the path, so that its requests pass through as little
code as possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.core.asgi import get_asgi_application

__all__ = ["application", "is_gateways", "serve"]

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mindrouter.settings")
django_application = get_asgi_application()

import mindrouter.celery  # noqa: E402, F401  the pages' tasks go to its broker
from mindrouter.gateway.consumer import (  # noqa: E402
    PROCESS_PAGES,
    GatewayConsumer,
    running_runtime,
    serve,
    serves,
)
from scheduler.consumers import routes  # noqa: E402
from scheduler.serving import current  # noqa: E402

#: By ``settings.SERVES``: whether a path is the gateway's.
_IS_GATEWAYS: dict[str, Callable[[str], bool]] = {
    "all": serves,
    "api": lambda path: True,
    "pages": PROCESS_PAGES.__contains__,
}
is_gateways = _IS_GATEWAYS.get(settings.SERVES, serves)  # a system check has told
gateway = GatewayConsumer()  # one for all requests, as it keeps nothing of any
others = ProtocolTypeRouter(
    {"http": django_application, "websocket": AuthMiddlewareStack(URLRouter(routes))}
)


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application of every server."""
    if scope["type"] == "http" and is_gateways(scope["path"]):
        await gateway(scope, receive, send)
    elif scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif settings.SERVES == "api":
        await send({"type": "websocket.close"})
    else:
        await others(scope, receive, send)


async def _lifespan(receive: Any, send: Any) -> None:
    await receive()
    try:
        await running_runtime()
    except Exception as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()
    runtime = current()
    if runtime is not None:
        await runtime.stop()
    await send({"type": "lifespan.shutdown.complete"})
