"""Forms as they are read and sent on, without a router around them."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.filepart import FilePart
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.surfaces import upload as upload_module
from mindrouter.gateway.surfaces.form import Form
from mindrouter.gateway.surfaces.reading import read_audio_form, read_image_form
from mindrouter.gateway.surfaces.upload import MEMORY_BYTES, Upload
from tests.gateway.forms import END, KIND, MODEL, SOUND, part

OTHER = part("model", b"other")
WANTED = frozenset({"model", "prompt", "n", "size"})
values = st.binary(max_size=60)
cuts = st.lists(st.integers(0, 2000), max_size=12)


async def fed(body: bytes, at: list[int], tmp_path: Path) -> Form:
    form = Form(KIND.encode(), tmp_path, WANTED)
    edges = [0, *sorted({min(cut, len(body)) for cut in at}), len(body)]
    for start, end in pairwise(edges):
        await form.add(body[start:end])
    await form.end()
    return form


@given(values, values, cuts, st.sampled_from(["m", "", "größer/als"]))
def test_a_form_is_read_and_rewritten_the_same_however_it_is_cut(
    before: bytes, sound: bytes, at: list[int], name: str
) -> None:
    if b"\r\n--XX" in b"\r\n" + before + b"\r\n" + sound:
        return

    def of(model: str) -> bytes:
        return (
            part("other", before)
            + part("prompt", b"hum")
            + part("file", sound, "a")
            + part("model", model.encode())
            + END
        )

    form = asyncio.run(fed(of("whisper-1"), at, Path("/nowhere")))
    assert form.fields == {"model": "whisper-1", "prompt": "hum"}
    assert (form.files, form.file_bytes) == (1, len(sound))
    sent = [each if isinstance(each, bytes) else b"?" for each in form.body_for(name)]
    assert b"".join(sent) == of(name)


@given(st.binary(max_size=200), cuts)
def test_whatever_comes_is_read_or_refused(noise: bytes, at: list[int]) -> None:
    for body in (noise, MODEL + noise + END, MODEL[:20] + noise + SOUND + END):
        with contextlib.suppress(GatewayError):
            asyncio.run(fed(body, at, Path("/nowhere")))


def test_no_form_writes_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong with one is told to its client."""
    for broken in (b"hello", MODEL + b"--XX\r\nbad header\r\n\r\nvalue\r\n" + END):
        with pytest.raises(GatewayError):
            asyncio.run(fed(broken, [], Path("/nowhere")))
    assert caplog.records == []


def test_a_large_form_is_in_a_file_and_comes_out_of_it_whole(tmp_path: Path) -> None:
    body = MODEL + part("file", bytes(range(256)) * 20_000, "a") + END
    form = asyncio.run(fed(body, list(range(0, len(body), 50_000)), tmp_path))
    parts = form.body_for("a-longer-name")
    assert [type(each) for each in parts] == [FilePart, bytes, FilePart]
    out = b"".join(
        each if isinstance(each, bytes) else b"".join(map(bytes, each.pieces(77_777)))
        for each in parts
    )
    assert out == body.replace(b"\r\n\r\nm\r\n", b"\r\n\r\na-longer-name\r\n")
    assert sum(map(len, parts)) == len(out)
    assert list(tmp_path.iterdir()) == []  # it has no name
    form.close()
    assert form.upload.bytes_in_memory == 0


@pytest.mark.parametrize("why", ["No such file", "No space left"])
async def test_a_disk_that_takes_no_upload_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Also one that is nearly full: records need room more than uploads do."""
    if why == "No space left":
        monkeypatch.setattr(upload_module, "LEAST_FREE_BYTES", 1 << 60)
    upload = Upload(tmp_path if why == "No space left" else tmp_path / "missing")
    with pytest.raises(GatewayError, match=f"cannot keep the upload: {why}") as refused:
        await upload.add(bytes(MEMORY_BYTES + 1))
    assert refused.value.status == 500
    upload.close()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (SOUND + END, "'model' is missing"),
        (part("model", b"") + SOUND + END, "'model' is missing"),
        (MODEL + END, "'file' is missing"),
        (MODEL + SOUND, "breaks off"),
        (MODEL + SOUND[:-30], "breaks off"),
        (b"", "breaks off"),
        (b"hello", "cannot be read"),
        (b'{"model": "m"}', "cannot be read"),
        (MODEL + part("model", b"other") + SOUND + END, "one 'model'"),
        (part("model", b"m", "m.txt") + SOUND + END, "one 'model'"),
        (
            part("model", b"bQ==", more="Content-Transfer-Encoding: base64\r\n") + SOUND + END,
            "one 'model'",
        ),
        (part("model", b"\xff\xfe") + SOUND + END, "not UTF-8"),
        (part("model", b"\r\n--X") + SOUND + END, "no name of a model"),
        (part("model", b"x" * 301) + SOUND + END, "too long"),
        (MODEL + part("prompt", b"x" * 300_000) + SOUND + END, "'prompt' is too long"),
        (MODEL + b"--XX\r\n\r\nvalue\r\n" + SOUND + END, "not one name"),
        (MODEL + part('x"; name="model', b"m") + SOUND + END, "not one name"),
        (MODEL + part("x\"; NAME*=UTF-8''model; a=\"", b"m") + SOUND + END, "not one name"),
        (MODEL + b"--XX\r\nbad header\r\n\r\nvalue\r\n" + SOUND + END, "cannot be read"),
        (MODEL + part("a", b"", more="X: 1\r\nx: 2\r\n") + SOUND + END, "a header twice"),
        (MODEL + part("a", b"") * 1000 + SOUND + END, "more than 1000 parts"),
        (MODEL + SOUND + END + part("model", b"other") + END, "where none belongs"),
        (MODEL + part("a", b"", more="--XX--b: 1\r\n") + SOUND + END, "where none belongs"),
    ],
)
async def test_a_form_that_is_none_is_refused_in_words(
    body: bytes, told: str, tmp_path: Path
) -> None:
    with pytest.raises(GatewayError, match=told) as refused:
        read_audio_form(await fed(body, [], tmp_path))
    assert refused.value.code == "invalid_request"


OTHER_PART = b'Content-Disposition: form-data; name="model"\r\n\r\nother\r\n'
#: Where other readers see a boundary, and ours does not.
ODD = (
    part("a", b"").removesuffix(b"\r\n") + b"--XX\r\n" + OTHER_PART,  # behind a blank line
    part("a", b"--XX--\r\n--XX--\r\n") + b"--XX\r\n" + OTHER_PART,
    part("a", b"x", "a").removesuffix(b"\r\n") + b"\n--XX\r\n" + OTHER_PART,  # LF alone
    part("a", b"x", "a").removesuffix(b"\r\n") + b"\r--XX\r\n" + OTHER_PART,  # CR alone
    part("a", b"x", "a") + b"--XXjunk\r\n" + OTHER_PART,
    part("a", b"x", "a") + b"anything--XX\r\n" + OTHER_PART,  # within a line
    END + b"--XX\r\n" + OTHER_PART,
)


@given(cuts, st.sampled_from(ODD))
def test_a_boundary_that_only_others_see_is_refused_however_it_is_cut(
    at: list[int], odd: bytes
) -> None:
    with pytest.raises(GatewayError):
        asyncio.run(fed(MODEL + odd + END, at, Path("/nowhere")))


@given(
    cuts,
    st.sampled_from(
        [b"", b"\r\n", b" \t\r\n\r\n", b" " * 1022, b" " * 1023, b"--", b"x", b"\r\nx"]
    ),
)
def test_behind_a_forms_end_there_are_blanks_alone_however_it_is_cut(
    at: list[int], behind: bytes
) -> None:
    body = MODEL + SOUND + END[:-2] + behind
    if behind.strip() or len(behind) == 1023:
        with pytest.raises(GatewayError, match="behind its end"):
            asyncio.run(fed(body, at, Path("/nowhere")))
    else:
        form = asyncio.run(fed(body, at, Path("/nowhere")))
        assert b"".join(map(bytes, form.body_for("other"))) == body.replace(MODEL, OTHER)


@given(cuts)
def test_a_boundary_of_dashes_is_one(at: list[int]) -> None:
    """Each of them is in the next one, too, wherever a read ends."""

    async def read() -> Form:
        form = Form(b"multipart/form-data; boundary=----", Path("/nowhere"), WANTED)
        body = (MODEL + part("n", b"2") + END).replace(b"--XX", b"------")
        starts = sorted({0, *(n % len(body) for n in at)})
        for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
            await form.add(body[start:end])
        await form.end()
        return form

    assert asyncio.run(read()).fields == {"model": "m", "n": "2"}


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "x", "9" * 20])
async def test_a_number_of_images_is_one(count: str, tmp_path: Path) -> None:
    body = MODEL + part("image", b"x", "a") + part("n", count.encode()) + END
    with pytest.raises(GatewayError, match="'n' must be"):
        read_image_form(await fed(body, [], tmp_path))
