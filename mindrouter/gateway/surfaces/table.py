"""The addresses that make something else than text, and what each of them takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mindrouter.gateway.requests import Asked
from mindrouter.gateway.surfaces import reading
from mindrouter.gateway.surfaces.form import Form, malformed
from scheduler.core.jobs import Task

_TEXTS = (b"text/", b"application/x-subrip")
_SOUNDS = (b"audio/", b"application/octet-stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One address. ``read`` is for a JSON body, ``read_form`` for a form; one of them may be
    missing. Besides JSON, an answer may be of the ``kinds``, and is passed on ``at_once`` then
    or when it is whole."""

    name: str  # as recorded
    path: bytes  # at the backend
    path_at: Mapping[str, bytes] = field(default_factory=dict)  # at those of some engines
    task: Task
    read: Callable[[bytes, str | None], Asked] | None = None
    read_form: Callable[[Form], Asked] | None = None
    kinds: tuple[bytes, ...] = ()
    at_once: bool = False

    def path_of(self, engine: str) -> bytes:
        return self.path_at.get(engine, self.path)

    def takes(self, kind: bytes) -> bool:
        """Whether an answer of this content type, in lower case, can be one."""
        if b"json" in kind:
            return True
        # Pages are errors of some proxy, and a stream that was not asked for has another form.
        return kind.startswith(self.kinds) and not kind.startswith(
            (b"text/html", b"text/event-stream")
        )


def refuse_json(body: bytes, header_cache_key: str | None) -> Asked:
    """Raises: GatewayError."""
    raise malformed("The body must be multipart/form-data.")


_RERANK = Surface(name="rerank", path=b"/v1/rerank", task="rerank", read=reading.read_rerank)
_SCORE = Surface(name="score", path=b"/v1/score", task="rerank", read=reading.read_score)

SURFACES: dict[str, Surface] = {
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": Surface(  # the only one that Text Embeddings Inference has
        name="rerank",
        path=b"/rerank",
        path_at={"sglang": b"/v1/rerank"},
        task="rerank",
        read=reading.read_rerank,
    ),
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/moderations": Surface(
        name="moderations",
        path=b"/v1/moderations",
        task="moderation",
        read=reading.read_moderation,
    ),
    "/v1/audio/transcriptions": Surface(
        name="audio.transcriptions",
        path=b"/v1/audio/transcriptions",
        task="transcription",
        read_form=reading.read_audio_form,
        kinds=_TEXTS,
    ),
    "/v1/audio/translations": Surface(
        name="audio.translations",
        path=b"/v1/audio/translations",
        task="transcription",
        read_form=reading.read_audio_form,
        kinds=_TEXTS,
    ),
    "/v1/audio/speech": Surface(
        name="audio.speech",
        path=b"/v1/audio/speech",
        task="speech",
        read=reading.read_speech,
        kinds=_SOUNDS,
        at_once=True,
    ),
    "/v1/images/generations": Surface(
        name="images.generations",
        path=b"/v1/images/generations",
        task="images",
        read=reading.read_images,
    ),
    "/v1/images/edits": Surface(
        name="images.edits",
        path=b"/v1/images/edits",
        task="images",
        read=reading.read_images,
        read_form=reading.read_image_form,
    ),
    "/v1/images/variations": Surface(
        name="images.variations",
        path=b"/v1/images/variations",
        task="images",
        read_form=reading.read_image_form,
    ),
}
