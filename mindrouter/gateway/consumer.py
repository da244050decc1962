"""The gateway: a Channels consumer that serves the client-facing API.

It overrides ``__call__`` and does the work there. Channels' own HTTP consumer would see a client
leave only after its handler had ended, and opens a channel for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from typing import Any

import msgspec
from channels.consumer import AsyncConsumer
from django.conf import settings
from django.db import DatabaseError

from mindrouter.gateway.client import Client, ClientLeftError, Headers, Receive, Scope, Send
from mindrouter.gateway.dialects import openai
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.exchange import Exchange, Operation, error_headers
from mindrouter.gateway.requests import read_chat, read_completion, read_embeddings
from scheduler.core.jobs import ModelSpec
from scheduler.runtime import Runtime, current
from scheduler.snapshot import Key
from scheduler.spool import Record

logger = logging.getLogger(__name__)

OPERATIONS = {
    "/v1/chat/completions": Operation("chat.completions", b"/v1/chat/completions", read_chat),
    "/v1/completions": Operation("completions", b"/v1/completions", read_completion),
    "/v1/embeddings": Operation("embeddings", b"/v1/embeddings", read_embeddings),
}
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/healthz"
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON: Headers = [(b"content-type", b"application/json")]
_EXPOSED = (
    b"x-request-id, x-mindrouter-backend, x-mindrouter-queue-ms, x-mindrouter-reason, retry-after"
)
_encode = msgspec.json.Encoder().encode
_starting = asyncio.Lock()


def serves(path: str) -> bool:
    """Whether a path belongs to the gateway; all others are pages and the management API."""
    return path.startswith("/v1/") or path in (HEALTH_PATH, "/v1")


async def running_runtime() -> Runtime:
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
            return await Runtime.start()
        except DatabaseError as error:
            logger.error("Cannot start without the database: %s", error)
            raise GatewayError(
                "no_backend_available", "The router cannot start: no database.", retry_after=5
            ) from error


class GatewayConsumer(AsyncConsumer):  # type: ignore[misc]
    """One HTTP request. No exception leaves it: once a response has begun, a server such as
    daphne would try to begin a second one, and stop noticing clients that leave."""

    channel_layer_alias = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = os.urandom(16).hex()
        cors = _cors_headers(scope)
        client = Client(scope, receive, send, [(b"x-request-id", request_id.encode()), *cors])
        try:
            await _route(client, request_id)
        except GatewayError as error:
            await _respond_error(client, error)
        except ClientLeftError:
            pass
        except Exception:
            logger.exception("Request %s failed in the router itself", request_id)
            if not client.started:
                await _respond_error(client, GatewayError("internal_error", "The router failed."))


async def _route(client: Client, request_id: str) -> None:
    path, method = client.scope["path"], client.scope["method"]
    if method == "OPTIONS" and b"access-control-request-method" in client.headers:
        await client.respond(204, _preflight_headers(client), b"")
        return
    if path == HEALTH_PATH:
        _allow(method, "GET", "HEAD")
        await client.respond(200, _JSON, b'{"status":"ok"}')
        return
    operation = OPERATIONS.get(path)
    if operation is not None:
        _allow(method, "POST")
        await _serve(client, operation, request_id)
    elif path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        _allow(method, "GET", "HEAD")
        await _models(client, path[len(MODELS_PATH) + 1 :])
    else:
        raise GatewayError("not_found", f"There is nothing at {path}.")


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise GatewayError(
            "method_not_allowed",
            f"{method} is not allowed here.",
            headers=((b"allow", ", ".join(allowed).encode()),),
        )


async def _serve(client: Client, operation: Operation, request_id: str) -> None:
    runtime = await running_runtime()
    own_id = client.header(b"x-request-id")
    record = Record(
        request_id=request_id,
        arrived_at=time.time(),
        client_request_id=own_id if own_id and _CLIENT_REQUEST_ID.fullmatch(own_id) else None,
        dialect=openai.NAME,
        endpoint=operation.name,
        attempts=[],
    )
    try:
        key = authenticate(runtime, client)
        user = runtime.snapshot.users[key.user_id]
        record.user_id, record.user = user.user_id, user.username
        record.group = user.group_name or ""
        if runtime.stopping:
            raise GatewayError("shutting_down", "The router is shutting down.", retry_after=5)
    except GatewayError as error:
        record.outcome, record.reason, record.status = "refused", error.code, error.status
        record.message, record.ended_at = error.message, time.time()
        runtime.spool.close(record)
        raise
    await Exchange(runtime, client, operation, key, record).run()


def authenticate(runtime: Runtime, client: Client) -> Key:
    """The key that a request carries. Raises: GatewayError."""
    text = _key_text(client)
    if not text:
        raise GatewayError(
            "invalid_api_key",
            "No API key. Send it as 'Authorization: Bearer KEY'.",
            headers=((b"www-authenticate", b"Bearer"),),
        )
    digest = hashlib.sha256(text.encode("latin-1", "replace")).hexdigest()
    snapshot = runtime.snapshot
    key = snapshot.keys.get(digest)
    if key is not None and key.user_id in snapshot.users:
        if key.expires_at is None or key.expires_at > time.time():
            return key
    elif runtime.database_away:
        # It may be a new key that cannot be seen now: neither a refusal nor a pass.
        raise GatewayError(
            "no_backend_available", "API keys cannot be checked right now.", retry_after=5
        )
    raise GatewayError("invalid_api_key", "The API key is unknown, disabled or expired.")


def _key_text(client: Client) -> str:
    scheme, _, key = (client.header(b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return client.header(b"x-api-key") or client.header(b"api-key") or ""


async def _models(client: Client, name: str) -> None:
    runtime = await running_runtime()
    key = authenticate(runtime, client)
    models = visible_models(runtime, key.user_id)
    if name:
        if name not in models:
            raise GatewayError("model_not_found", f"There is no model {name!r}.", param="model")
        document: Any = models[name]
    else:
        document = {"object": "list", "data": list(models.values())}
    await client.respond(200, _JSON, _encode(document))


def visible_models(runtime: Runtime, user_id: int) -> dict[str, dict[str, Any]]:
    """What a user may ask for, by name; aliases win over models of the same name."""
    snapshot = runtime.snapshot
    allowed = snapshot.allowed_models.get(user_id)
    specs: dict[str, ModelSpec] = dict(snapshot.listed_models)
    for alias in snapshot.aliases:
        target = snapshot.models.get(runtime.resolve_alias(alias))
        specs.pop(alias, None)
        if target is not None:
            specs[alias] = target
    return {
        name: openai.model_object(name, **_facts(spec))
        for name, spec in sorted(specs.items())
        if allowed is None or name in allowed
    }


def _facts(spec: ModelSpec) -> dict[str, Any]:
    able = ("vision", "tools", "json", "embeddings")
    return {
        "max_model_len": spec.context_length,
        "capabilities": {name: getattr(spec, name) for name in able},
    }


async def _respond_error(client: Client, error: GatewayError) -> None:
    if client.started:
        await client.cut()
        return
    await client.respond(error.status, error_headers(error), openai.error_body(error))


# ---- CORS, as configured


def _cors_headers(scope: Scope) -> Headers:
    allowed = settings.CORS_ALLOWED_ORIGINS
    if not allowed:
        return []
    origin = dict(scope["headers"]).get(b"origin")
    if origin is None or not ("*" in allowed or origin.decode("latin-1") in allowed):
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"vary", b"origin"),
        (b"access-control-expose-headers", _EXPOSED),
    ]


def _preflight_headers(client: Client) -> Headers:
    if not _cors_headers(client.scope):
        raise GatewayError("permission_denied", "This origin is not allowed.")
    wanted = client.headers.get(b"access-control-request-headers", b"")
    return [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"600"),
    ]
