"""Parses a multipart body in memory into fields and one file, with bounds on all but the file; for audio endpoints."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.long_work import LongWork

MAX_FIELDS = 32
"""Largest number of fields, the file included."""
MAX_HEADER_BYTES, MAX_VALUE_BYTES = 4096, 65_536
"""Longest headers of a field, and longest value besides the file's."""
_BOUNDARY = re.compile(rb"(?:\r\n)?--([!-~]{1,70})\r\n")


SLICE = 2**18
"""Bytes that are parsed before other requests get a turn."""


@dataclass(slots=True, weakref_slot=True)
class Form:
    """Fields of a form by name, and its file; field: where the client wrote the file, for errors."""

    fields: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    filename: str = ""
    file: bytes | None = None
    field: str = "file"


async def read_form(data: bytes) -> Form:
    """Return the form of a multipart body; raise InvalidRequest.

    The boundary is that of the body's first line, as all clients write it."""
    found = _BOUNDARY.match(data)
    if found is None:
        raise InvalidRequest("the request body must be a multipart form with file and model")
    reader = _Reader()
    parser = MultipartParser(found[1], {
        "on_part_begin": reader.begin, "on_header_field": reader.header_name, "on_header_value": reader.header_value,
        "on_header_end": reader.header_end, "on_part_data": reader.data, "on_part_end": reader.end,
        "on_end": reader.finish,
    })  # fmt: skip
    work = LongWork()
    try:
        for start in range(0, len(data), SLICE):
            parser.write(data[start : start + SLICE])
            await work.pause()
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}") from error
    if not reader.finished:
        raise InvalidRequest("the form is cut off")
    return reader.form


class _Reader:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.form, self.finished = Form(), False
        self._count = self._header_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._parts: list[bytes] = []

    def begin(self) -> None:
        self._count += 1
        if self._count > MAX_FIELDS:
            raise InvalidRequest(f"a form may have at most {MAX_FIELDS} fields")
        self._headers, self._parts, self._header_bytes = {}, [], 0

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._grow(end - start)
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow(end - start)
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def data(self, data: bytes, start: int, end: int) -> None:
        self._parts.append(data[start:end])

    def end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name, value = options.get(b"name", b"").decode("utf-8", "replace"), b"".join(self._parts)
        self._parts = []
        if b"filename" in options or name == "file":
            if name != "file" or self.form.file is not None:
                raise InvalidRequest("a form must have one file, named file", param="file")
            self.form.file = value
            self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:256] or "audio"
            return
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidRequest(f"{name[:64]} has more than {MAX_VALUE_BYTES} bytes", param=name[:64])
        self.form.fields.setdefault(name, []).append(value.decode("utf-8", "replace"))

    def finish(self) -> None:
        self.finished = True

    def _grow(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequest(f"the headers of a field have more than {MAX_HEADER_BYTES} bytes")
