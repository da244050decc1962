"""``multipart/form-data``: its small fields are read as it passes, its files are not."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from backends.filepart import FilePart
from mindrouter.gateway.errors import GatewayError
from mindrouter.gateway.surfaces.upload import Upload

KIND = b"multipart/form-data"
#: Bytes of a field that the router reads; OpenAI's longest prompt for an image has 32,000 letters.
MAX_FIELD_BYTES = 256 * 1024
MAX_PARTS = 1000
#: Parsers differ in which one counts where there are two.
_NAMES = re.compile(rb"(?<![\w*])name\s*\*?\s*=", re.IGNORECASE)
_BOUNDARIES = re.compile(rb"boundary\s*\*?\s*=", re.IGNORECASE)
#: How a form ends behind its last boundary; some readers go on where there is anything else.
_CLOSING = re.compile(rb"--[\r\n\t ]*")
MAX_BLANKS = 1024


class Form:
    """A form that is read while it comes in.

    ``fields`` has the last value of each wanted field that came without a file name. The field
    ``model`` must come once and plainly, since another reader of a form with two might take the
    other one. It may come behind the file: the whole form is taken in before it waits for a
    backend, so that a slow client holds no slot, and can be sent again if an attempt fails.
    """

    def __init__(self, content_type: bytes, folder: Path, wanted: Container[str]) -> None:
        """Raises: GatewayError where this is no content type of a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != KIND or not boundary or len(_BOUNDARIES.findall(content_type)) > 1:
            raise malformed("The body must be multipart/form-data with a boundary.")
        self.content_type = content_type
        self.fields: dict[str, str] = {}
        self.file_bytes = 0
        self.files = 0
        self.upload = Upload(folder)
        self._wanted = wanted
        self._boundary = re.compile(re.escape(b"--" + boundary))
        self._boundaries = 0  # seen anywhere
        self._before = b""  # the last bytes, in which one may begin
        self._most_before = len(boundary) + 1
        self._behind = b""  # what has come since the latest one, as far as it may be blank
        self._model_at: tuple[int, int] | None = None
        self._parts = 0
        self._chunk = b""  # what is being parsed, and where in the body it begins
        self._chunk_at = 0
        self._headers: dict[bytes, bytes] = {}  # of the current part
        self._header_name = self._header_value = b""
        self._name: str | None = None  # of the current part, where its value is wanted
        self._is_file = False
        self._value = bytearray()
        self._value_at = 0
        self._ended = False
        try:
            self._parser: MultipartParser | None = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise malformed(f"The form cannot be read: {error}.") from None

    async def add(self, data: bytes) -> None:
        """What has come next. Raises: GatewayError."""
        assert self._parser is not None  # noqa: S101  not closed yet
        self._count_boundaries(data)
        self._chunk, self._chunk_at = data, self.upload.size
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise malformed(f"The form cannot be read: {error}.") from None
        self._chunk = b""
        await self.upload.add(data)

    async def end(self) -> None:
        """All has come. Raises: GatewayError where that is no whole form."""
        if not self._ended:
            raise malformed("The form breaks off before its end.")
        if self._boundaries != self._parts + 1:
            # Another reader may find a part there, and in it another model.
            raise malformed("The form has a boundary where none belongs.")
        if len(self._behind) > MAX_BLANKS or not _CLOSING.fullmatch(self._behind):
            raise malformed("The form has something behind its end.")
        await self.upload.end()

    @property
    def model(self) -> str:
        """Raises: GatewayError where there is none."""
        model = self.fields.get("model")
        if not model:
            raise GatewayError("invalid_request", "'model' is missing.", param="model")
        return model

    def body_for(self, model_name: str) -> list[bytes | FilePart]:
        """The form as it came, for a backend that calls the model ``model_name``."""
        upload = self.upload
        if self._model_at is None or model_name == self.fields.get("model"):
            return upload.parts(0, upload.size)
        start, end = self._model_at
        name = model_name.encode()
        return [*upload.parts(0, start), name, *upload.parts(end, upload.size)]

    def close(self) -> None:
        self.upload.close()
        self._parser = None  # it refers back

    def _count_boundaries(self, data: bytes) -> None:
        """Whatever the parser makes of them: readers differ in what may stand around one."""
        text = self._before + data
        ends = [found.end() for found in self._boundary.finditer(text)]
        if ends:
            self._boundaries += len(ends)
            text = text[ends[-1] :]
            self._behind = text[: MAX_BLANKS + 1]
        elif len(self._behind) <= MAX_BLANKS:
            self._behind += data[: MAX_BLANKS + 1]
        self._before = text[-self._most_before :]

    # ---- the parser

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise malformed(f"The form has more than {MAX_PARTS} parts.")
        self._headers = {}
        self._name = None
        self._value = bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name = self._header_name.lower()
        if name in self._headers:
            raise malformed("A part of the form has a header twice.")
        self._headers[name] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        kind, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name or len(_NAMES.findall(disposition)) > 1:
            raise malformed("A part of the form has not one name.")
        self._is_file = b"filename" in options
        self.files += self._is_file
        if name == "model" and (
            self._is_file
            or self._model_at is not None
            or b"content-transfer-encoding" in self._headers
        ):
            raise malformed("The form must have one 'model', as a plain field.", "model")
        if not self._is_file and name in self._wanted:
            self._name = name

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.file_bytes += end - start
        elif self._name is not None:
            if not self._value:
                # Bytes that might have been a boundary come from the parser's own memory.
                self._value_at = self._chunk_at + start if data is self._chunk else -1
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise malformed(f"'{self._name}' is too long.", self._name)

    def _end_part(self) -> None:
        name = self._name
        if name is None:
            return
        try:
            self.fields[name] = self._value.decode()
        except UnicodeDecodeError:
            raise malformed(f"'{name}' is not UTF-8.", name) from None
        if name == "model":
            if self._value_at < 0 or not self.fields[name].isprintable():
                raise malformed("'model' is no name of a model.", name)
            self._model_at = self._value_at, self._value_at + len(self._value)

    def _end(self) -> None:
        self._ended = True


def malformed(message: str, param: str | None = None) -> GatewayError:
    return GatewayError("invalid_request", message, param=param)
