"""The gateway: what serves the client-facing API, and a Channels consumer that does so.

Our own protocol calls ``serve`` itself; behind any other server the consumer does. It overrides
``__call__``: Channels' own HTTP consumer would see a client leave only after its handler had ended,
and opens a channel for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator

from channels.consumer import AsyncConsumer
from django.conf import settings
from django.db import DatabaseError

from accounts.attempts import address_of, note_failed_key, too_many_failed
from mindrouter import logs
from mindrouter.gateway import mine, models, traces
from mindrouter.gateway.capturing import HEADER, capturing
from mindrouter.gateway.client import (
    Asgi,
    Client,
    ClientLeftError,
    Headers,
    Receive,
    Scope,
    Send,
)
from mindrouter.gateway.dialects.addresses import FORMS, errors_at
from mindrouter.gateway.dialects.ollama import models as ollama
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.exchange import Exchange, Operation, error_headers
from mindrouter.gateway.heads import Head
from mindrouter.gateway.requests import read_chat, read_completion, read_embeddings
from mindrouter.gateway.surfaces.exchange import SurfaceExchange
from mindrouter.gateway.surfaces.table import SURFACES, refuse_json
from mindrouter.gateway.translating import FormExchange
from mindrouter.health import PROBES
from mindrouter.logs import CLIENT_REQUEST_ID
from mindrouter.metrics import tell_metrics
from scheduler.core.jobs import ModelSpec
from scheduler.runtime import Runtime
from scheduler.serving import Serving, current
from scheduler.snapshot import Key
from scheduler.spool import Record

logger = logging.getLogger(__name__)

OPERATIONS = {
    "/v1/chat/completions": Operation("chat.completions", b"/v1/chat/completions", read_chat),
    "/v1/completions": Operation("completions", b"/v1/completions", read_completion),
    "/v1/embeddings": Operation("embeddings", b"/v1/embeddings", read_embeddings),
    **{
        path: Operation(form.operation, form.path, form.read, form.dialect, form.errors, form)
        for path, form in FORMS.items()
    },
    **{
        path: Operation(surface.name, surface.path, surface.read or refuse_json, surface=surface)
        for path, surface in SURFACES.items()
    },
}
MODELS_PATHS = ("/v1/models", "/anthropic/v1/models")
_ANTHROPIC_PATHS = {path for path, form in FORMS.items() if form.dialect == "anthropic"}
REQUESTS_PATH = "/v1/requests/"
MAX_SHOW_BYTES = 64 * 1024
#: What every process answers, whatever it serves.
PROCESS_PAGES = {**PROBES, "/metrics": tell_metrics}
#: What else is the gateway's, outside of the APIs' own folders.
_ROOT_PATHS = frozenset(
    {*PROCESS_PAGES, "/v1", "/api", "/anthropic", "/rerank", "/v2/rerank", "/score"}
)
_JSON: Headers = [(b"content-type", b"application/json")]
_EXPOSED = b", ".join(
    (
        b"x-request-id",
        b"request-id",
        b"x-mindrouter-backend",
        b"x-mindrouter-queue-ms",
        b"x-mindrouter-reason",
        b"x-mindrouter-not-translated",
        HEADER,
        b"retry-after",
        b"x-should-retry",
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for of in (b"requests", b"tokens")
            for what in (b"limit", b"remaining", b"reset")
        ),
    )
)


def _ids() -> Iterator[str]:
    """Random ids of 128 bits; the system is asked once for 256 of them."""
    while True:
        digits = os.urandom(16 * 256).hex()
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_new_id = _ids().__next__
_starting = asyncio.Lock()


def serves(path: str) -> bool:
    """Whether a path belongs to the gateway; all others are pages and the management API."""
    if path.startswith("/v1/") or path in _ROOT_PATHS:
        return True
    if path.startswith("/api/"):
        return not path.startswith("/api/admin/") and path != "/api/admin"
    return path.startswith("/anthropic/")


async def running_runtime() -> Serving:
    """This process's runtime, started on the first request where the server has no lifespan.

    Raises: GatewayError.
    """
    runtime = current()
    if runtime is not None:
        return runtime
    async with _starting:
        if (runtime := current()) is not None:
            return runtime
        try:
            return await _kind_of_runtime().start()
        except DatabaseError as error:
            logger.error("Cannot start without the database: %s", error)
            raise GatewayError(
                "no_backend_available", "The router cannot start: no database.", retry_after=5
            ) from error


def _kind_of_runtime() -> type[Serving]:
    """With Redis the scheduler is a process of its own, which all gateways share."""
    if not settings.REDIS_URL:
        return Runtime
    from scheduler.bus.gateway import RemoteRuntime

    return RemoteRuntime


class GatewayConsumer(AsyncConsumer):  # type: ignore[misc]
    """One HTTP request behind a server that is not our own."""

    channel_layer_alias = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = Head(scope["method"], scope["path"], list(scope["headers"]))
        await serve(Client(head, Asgi(receive, send, (scope.get("client") or ("",))[0])))


async def serve(client: Client) -> None:
    """Serve one request. No exception leaves it: once a response has begun, a server such as
    daphne would try to begin a second one, and stop noticing clients that leave."""
    request_id = _new_id()
    logs.request_id.set(request_id)
    head = client.head
    common = client.common_headers
    common.append((b"x-request-id", request_id.encode()))
    if head.path in _ANTHROPIC_PATHS:  # its packages read their own name for it
        common.append((b"request-id", common[0][1]))
    if b"origin" in head.headers:
        common += _cors_headers(head)
    try:
        operation = OPERATIONS.get(head.path)
        if operation is not None and head.method == "POST":
            runtime = current() or await running_runtime()
            await _exchange(client, operation, request_id, runtime).run()
        else:
            await _route(client, operation)
    except GatewayError as error:
        await _respond_error(client, error, request_id)
    except ClientLeftError:
        pass
    except Exception:
        logger.exception("Request %s failed in the router itself", request_id)
        if not client.started:
            failed = GatewayError("internal_error", "The router failed.")
            await _respond_error(client, failed, request_id)


async def _route(client: Client, operation: Operation | None) -> None:
    """All that is no completion. Raises: GatewayError, ClientLeftError."""
    path, method = client.head.path, client.head.method
    if method == "OPTIONS" and b"access-control-request-method" in client.headers:
        await client.respond(204, _preflight_headers(client), b"")
        return
    if path in PROCESS_PAGES:
        _allow(method, "GET", "HEAD")
        await PROCESS_PAGES[path](client)
    elif operation is not None:
        _allow(method, "POST")
    elif path in OLLAMA_PAGES:
        allowed, page = OLLAMA_PAGES[path]
        _allow(method, *allowed)
        await page(client)
    elif path in ollama.MANAGING or path.startswith("/api/blobs/"):
        raise ollama.managing_refused()
    elif path in MINE:
        _allow(method, "GET")
        await _tell_owner(client, MINE[path])
    elif path.startswith(REQUESTS_PATH):
        _allow(method, "GET")
        wanted = path[len(REQUESTS_PATH) :]
        await _tell_owner(client, lambda runtime, key: mine.request(runtime, key, wanted))
    else:
        await _models(client, path)


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise GatewayError(
            "method_not_allowed",
            f"{method} is not allowed here.",
            headers=((b"allow", ", ".join(allowed).encode()),),
        )


def _exchange(client: Client, operation: Operation, request_id: str, runtime: Serving) -> Exchange:
    """What serves the request, if its key is good for it; else it is recorded as refused.

    Raises: GatewayError.
    """
    own_id = client.header(b"x-request-id")
    record = Record(
        request_id=request_id,
        arrived_at=time.time(),
        client_request_id=own_id if own_id and CLIENT_REQUEST_ID.fullmatch(own_id) else None,
        dialect=operation.dialect,
        endpoint=operation.name,
        attempts=[],
    )
    if (context := client.headers.get(b"traceparent")) is not None:
        record.traceparent = traces.checked(context)
    try:
        key = authenticate(runtime, client)
        user = runtime.snapshot.users[key.user_id]
        record.user_id, record.user = user.user_id, user.username
        record.key_id, record.group = key.key_id or None, user.group_name or ""
        if runtime.stopping:
            raise GatewayError("shutting_down", "The router is shutting down.", retry_after=5)
    except GatewayError as error:
        record.outcome, record.reason, record.status = "refused", error.code, error.status
        record.message, record.ended_at = error.message, time.time()
        runtime.spool.close(record)
        raise
    if key.capturing is not None:
        client = capturing(client, runtime, key, record)
    kind: type[Exchange] = Exchange
    if operation.form is not None:
        kind = FormExchange
    elif operation.surface is not None:
        kind = SurfaceExchange
    return kind(runtime, client, operation, key, record)


def authenticate(runtime: Serving, client: Client) -> Key:
    """The key that a request carries. Raises: GatewayError."""
    head = client.head
    digest = head.key_digest
    if digest is None:
        digest = head.key_digest = _key_digest(head)
    if not digest:
        if head.path.startswith("/api/") and (opened := _opened(runtime, client)):
            return opened
        raise GatewayError(
            "invalid_api_key",
            "No API key. Send it as 'Authorization: Bearer KEY'.",
            headers=((b"www-authenticate", b"Bearer"),),
        )
    snapshot = runtime.snapshot
    key = snapshot.keys.get(digest)
    if key is not None and key.user_id in snapshot.users:
        if key.expires_at is None or key.expires_at > time.time():
            if key.allowed_apis is not None:
                _check_api(key.allowed_apis, client.head.path)
            runtime.key_used(key.key_id)
            return key
    elif runtime.database_away:
        # It may be a new key that cannot be seen now: neither a refusal nor a pass.
        raise GatewayError(
            "no_backend_available", "API keys cannot be checked right now.", retry_after=5
        )
    wait = note_failed_key(address_of(client.peer, head.lines))
    if wait is not None:
        raise GatewayError("rate_limit_exceeded", too_many_failed(), retry_after=wait)
    raise GatewayError("invalid_api_key", "The API key is unknown, disabled or expired.")


def _check_api(allowed: frozenset[str], path: str) -> None:
    """Whether a key that is limited to some APIs may ask here. Raises: GatewayError."""
    if path in MINE or path.startswith(REQUESTS_PATH):
        return  # one's own requests and usage, whichever way they came
    if path.startswith("/api/"):
        api = "ollama"
    elif path in _ANTHROPIC_PATHS or path.startswith("/anthropic/"):
        api = "anthropic"
    else:
        api = "openai"
    if api not in allowed:
        raise GatewayError("permission_denied", f"This key is not for the API {api!r}.")


def _opened(runtime: Serving, client: Client) -> Key | None:
    """Who Ollama's clients without a key are, where the admin has opened it to them.

    Never a page in somebody's browser, unless its origin is allowed: any page could send requests
    from within the network.
    """
    if b"origin" in client.headers and not _cors_headers(client.head):
        return None
    return runtime.snapshot.open_to


def _key_digest(head: Head) -> str:
    """SHA-256 of the key that it carries; empty: it carries none."""
    scheme, _, key = (head.header(b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        key = key.strip()
    else:
        key = head.header(b"x-api-key") or head.header(b"api-key") or ""
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest() if key else ""


# ---- what is known


async def _models(client: Client, path: str) -> None:
    """OpenAI's lists, or Anthropic's to its clients. Raises: GatewayError."""
    start = next((p for p in MODELS_PATHS if path == p or path.startswith(p + "/")), None)
    if start is None:
        raise GatewayError("not_found", f"There is nothing at {path}.")
    _allow(client.head.method, "GET", "HEAD")
    known = await _visible(client)
    anthropic = start != MODELS_PATHS[0] or b"anthropic-version" in client.headers
    if name := path[len(start) + 1 :]:
        await client.respond(200, _JSON, models.one_body(known, name, anthropic=anthropic))
    else:
        await client.respond(200, _JSON, models.list_body(known, anthropic=anthropic))


async def _visible(client: Client) -> dict[str, ModelSpec]:
    runtime = await running_runtime()
    key = authenticate(runtime, client)
    known, allowed = models.visible_models(runtime, key.user_id), key.allowed_models
    if allowed is None:
        return known
    return {name: spec for name, spec in known.items() if name in allowed}


async def _tags(client: Client) -> None:
    await client.respond(200, _JSON, models.tags_body(await _visible(client)))


async def _ps(client: Client) -> None:
    known = await _visible(client)
    await client.respond(200, _JSON, models.ps_body(known, await running_runtime()))


async def _show(client: Client) -> None:
    known = await _visible(client)
    body = await client.read_body(MAX_SHOW_BYTES)
    await client.respond(200, _JSON, models.show_body(known, body))


async def _version(client: Client) -> None:
    await client.respond(200, _JSON, ollama.version_body())


async def _tell_owner(client: Client, page: mine.Page) -> None:
    runtime = await running_runtime()
    body = await page(runtime, authenticate(runtime, client))
    await client.respond(200, _JSON, body)


MINE: dict[str, mine.Page] = {
    "/v1/queue/me": mine.queue,
    "/v1/usage/me": mine.usage,
    "/v1/usage/me/models": mine.usage_by_model,
    "/v1/limits/me": mine.limits,
}
OLLAMA_PAGES: dict[str, tuple[tuple[str, ...], Callable[[Client], Awaitable[None]]]] = {
    "/api/tags": (("GET", "HEAD"), _tags),
    "/api/ps": (("GET", "HEAD"), _ps),
    "/api/show": (("POST",), _show),
    "/api/version": (("GET", "HEAD"), _version),
}


async def _respond_error(client: Client, error: GatewayError, request_id: str) -> None:
    if client.started:
        await client.cut()
        return
    body = errors_at(client.head.path).body(error, request_id)
    respond = client.respond_unread if client.body_is_coming else client.respond
    await respond(error.status, error_headers(error), body)


# ---- CORS, as configured


def _cors_headers(head: Head) -> Headers:
    allowed = settings.CORS_ALLOWED_ORIGINS
    origin = head.headers.get(b"origin")
    if origin is None or not ("*" in allowed or origin.decode("latin-1") in allowed):
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"vary", b"origin"),
        (b"access-control-expose-headers", _EXPOSED),
    ]


def _preflight_headers(client: Client) -> Headers:
    if not _cors_headers(client.head):
        raise GatewayError("permission_denied", "This origin is not allowed.")
    wanted = client.headers.get(b"access-control-request-headers", b"")
    return [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"600"),
    ]
