"""Requests for something else than text: passed on as they came, to backends that can do it.

Everything from the queue to the record is the ordinary exchange's.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings

from backends.upstream import Body
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.exchange import EVENT_STREAM_HEAD, Exchange
from mindrouter.gateway.failures import Failure
from mindrouter.gateway.models import visible_models
from mindrouter.gateway.relay import BodyRelay, StreamRelay
from mindrouter.gateway.requests import Asked
from mindrouter.gateway.surfaces.answers import SurfaceEvents, SurfaceRelay
from mindrouter.gateway.surfaces.form import KIND, Form, malformed
from mindrouter.gateway.surfaces.reading import FORM_FIELDS, choose_model
from mindrouter.gateway.surfaces.table import Surface
from scheduler.serving import Claim
from scheduler.snapshot import Endpoint
from scheduler.spool import Attempt


class SurfaceExchange(Exchange):
    """One request whose operation has a surface. ``run`` never raises."""

    __slots__ = ("_form",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._form: Form | None = None  # its body, where that is one

    @property
    def surface(self) -> Surface:
        surface = self.operation.surface
        assert surface is not None  # noqa: S101  that is what this class is for
        return surface

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            if self._form is not None:
                self._form.close()

    async def _read(self) -> Asked:
        surface, kind = self.surface, self.client.headers.get(b"content-type", b"")
        is_form = kind.lower().startswith(KIND)
        if surface.read_form is not None and (is_form or surface.read is None):
            asked = surface.read_form(await self._read_form(kind))
        elif is_form:
            self.client.unread = self.client.body_is_coming
            raise malformed("The body must be JSON.")
        else:
            asked = await super()._read()
        if not asked.model:
            choose_model(asked, self._able())
        return asked

    async def _read_form(self, kind: bytes) -> Form:
        try:
            form = self._form = Form(kind, settings.DATA_DIR, FORM_FIELDS)
        except GatewayError:
            self.client.unread = self.client.body_is_coming
            raise
        await self.client.pour_body(form.add, self.runtime.snapshot.max_body_bytes)
        await form.end()
        return form

    def _able(self) -> list[str]:
        """The models of this key that are known to be for this."""
        visible, allowed = visible_models(self.runtime, self.key.user_id), self.key.allowed_models
        names: dict[str, str] = {}  # one for each model, though it may have an alias
        for name, spec in visible.items():
            if getattr(spec, self.surface.task) is True and (allowed is None or name in allowed):
                names.setdefault(spec.name, name)
        return list(names.values())

    async def _exchange(
        self, claim: Claim, asked: Asked, endpoint: Endpoint, attempt: Attempt
    ) -> Failure | None:
        if self._form is not None:
            endpoint = endpoint.sending(self._form.content_type)
        failure = await super()._exchange(claim, asked, endpoint, attempt)
        if failure is None or not _is_unable(failure):
            return failure
        what = self.surface.path_of(endpoint.engine).decode()
        message = f"Backend {endpoint.name} does not serve {what} for this model"
        why = f": {failure.error.message}" if failure.status == 501 else "."
        quoted = failure.error.quoted and failure.status == 501
        error = GatewayError("capability_missing", message + why, param="model", quoted=quoted)
        return Failure(error, "none", "elsewhere", failure.status)

    def _message(self, asked: Asked, endpoint: Endpoint, model_name: str) -> tuple[bytes, Body]:
        form = self._form
        body = asked.body_for(model_name) if form is None else form.body_for(model_name)
        return self.surface.path_of(endpoint.engine), body

    def _relay_of(
        self, kind: bytes, claim: Claim, asked: Asked, endpoint: Endpoint
    ) -> StreamRelay | BodyRelay | None:
        if asked.stream and kind.startswith(b"text/event-stream"):
            events = SurfaceEvents(
                prompt_tokens=asked.prompt_tokens, output_tokens=asked.max_tokens
            )
            head = [*EVENT_STREAM_HEAD, *self._headers(claim)]
            return StreamRelay(self, claim, asked, endpoint, head, events)
        surface, is_json = self.surface, b"json" in kind
        if self.client.started or not surface.takes(kind):
            return None
        head = [(b"content-type", kind), *self._headers(claim)]
        at_once = surface.at_once and not is_json
        return SurfaceRelay(self, claim, asked, endpoint, head, is_json=is_json, at_once=at_once)


def _is_unable(failure: Failure) -> bool:
    """Whether the backend lacks the address, or says that it cannot do this."""
    code = failure.error.code
    lacks = failure.status in (404, 405) and code != "model_not_found"
    return lacks or code == "capability_missing"
