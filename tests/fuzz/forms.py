"""Any bytes as a form: what is read does not depend on how they came, and a form that is taken has
the model that an independent reader, Django's, finds in it, for every backend's name of it."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.surfaces.form import Form
from mindrouter.gateway.surfaces.reading import FORM_FIELDS, read_audio_form, read_image_form
from tests.fuzz.bodies import check_refusal
from tests.fuzz.cutting import ways_to_cut
from tests.gateway.forms import KIND

LOOP = asyncio.new_event_loop()
NOWHERE = Path("/nowhere")  # nothing here is so large that it goes to a file
OTHER = "größer/another"


class Read(NamedTuple):
    fields: dict[str, str]
    files: int
    file_bytes: int
    sent: bytes
    sent_as_other: bytes


async def read(reads: list[bytes]) -> Read | None:
    form = Form(KIND.encode(), NOWHERE, FORM_FIELDS)
    try:
        for data in reads:
            await form.add(data)
        await form.end()
        name = form.model
        for reader in (read_audio_form, read_image_form):
            check_read(reader, form)
    except GatewayError as error:
        check_refusal(error)
        return None
    bodies = (b"".join(map(bytes, form.body_for(model))) for model in (name, OTHER))
    return Read(form.fields, form.files, form.file_bytes, *bodies)


def check_read(reader: Any, form: Form) -> None:
    try:
        asked = reader(form)
    except GatewayError as error:
        check_refusal(error)
    else:
        assert asked.model == form.model


class Found(NamedTuple):
    fields: dict[str, list[str]]
    files: dict[str, list[bytes]]


def independent(body: bytes) -> Found | None:
    meta = {"CONTENT_TYPE": KIND, "CONTENT_LENGTH": str(len(body))}
    try:
        fields, files = MultiPartParser(meta, BytesIO(body), [MemoryFileUploadHandler()]).parse()
    except MultiPartParserError:
        return None
    return Found(
        dict(fields.lists()),
        {name: [file.read() for file in each] for name, each in files.lists()},
    )


def check(data: bytes) -> None:
    first, *others = [LOOP.run_until_complete(read(way)) for way in ways_to_cut(data)]
    for other in others:
        assert other == first, f"{other} is not {first}"
    if first is None:
        return
    assert first.sent == data
    came, gets = independent(data), independent(first.sent_as_other)
    if came is None or gets is None:
        assert came is gets, data
        return
    assert came.fields.get("model", []) == [first.fields["model"]], f"{came} is not {first}"
    assert gets == came._replace(fields={**came.fields, "model": [OTHER]}), f"{gets} is not {came}"
