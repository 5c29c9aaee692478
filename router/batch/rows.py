"""Rows of a batch: reader and validation of the JSON-lines input, and the format of output rows."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 50_000
"""Maximum number of rows in a batch."""
MAX_ROW_BYTES = 16 * 2**20
"""Longest line, in bytes; parsing it holds the interpreter lock and so delays the event loop."""
MAX_ERRORS = 100
"""Maximum number of reported invalid lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request; `number` counts from 0.

    `body` is JSON bytes without a priority, since batches run after all other requests, and with a seed, so that a row
    that is run again gets the same tokens."""

    custom_id: str
    body: bytes
    number: int


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """Invalid line of a batch's input; `line` counts from 1."""

    line: int
    message: str
    param: str | None = None
    code: str = "invalid_request"

    def shown(self) -> dict[str, Any]:
        """Return the error as the API shows it."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class RowReader:
    """Reader of a batch's input, piece by piece: `feed` in the order of the content, then `end`.

    It returns every line that is not blank, up to the first that is too long. batch_id: part of generated seeds."""

    def __init__(self, endpoint: str, batch_id: str = "") -> None:
        self._endpoint, self._batch_id = endpoint, batch_id
        self._seen: set[str] = set()
        self._parts: list[bytes] = []
        self._size = self._line = 0
        self._ended = False

    def feed(self, piece: bytes) -> list[Row | InvalidRow]:
        """Return the rows that end in this piece."""
        *lines, rest = piece.split(b"\n")
        found: list[Row | InvalidRow] = []
        for line in lines:
            found += self._line_ended(line)
        if self._size + len(rest) > MAX_ROW_BYTES:
            found += self._line_ended(rest)
        self._parts.append(rest)
        self._size += len(rest)
        return found

    def end(self) -> list[Row | InvalidRow]:
        """Return the last row, if its line had no end."""
        return list(self._line_ended(b""))

    def _line_ended(self, last: bytes) -> Iterator[Row | InvalidRow]:
        """Yield the row of a complete line, whose last part is `last`."""
        line, self._parts, self._size = b"".join((*self._parts, last)), [], 0
        if self._ended:
            return
        self._line += 1
        if len(line) > MAX_ROW_BYTES:
            self._ended = True
            yield InvalidRow(self._line, f"the line is longer than {MAX_ROW_BYTES} bytes", code="line_too_long")
        elif line.strip():
            yield self._row(line)

    def _row(self, line: bytes) -> Row | InvalidRow:
        row = self._read(line)
        if isinstance(row, InvalidRow):
            return row
        if row.custom_id in self._seen:
            message = f"custom_id {row.custom_id!r} is used twice"
            return InvalidRow(self._line, message, "custom_id", "duplicate_custom_id")
        if row.number == MAX_ROWS:
            self._ended = True
            return InvalidRow(self._line, f"a batch takes at most {MAX_ROWS} requests", None, "too_many_requests")
        self._seen.add(row.custom_id)
        return row

    def _read(self, line: bytes) -> Row | InvalidRow:
        number = self._line
        try:
            value = json.loads(line)
        except RecursionError:
            return InvalidRow(number, "the line is nested too deeply", code="invalid_json_line")
        except ValueError as error:
            return InvalidRow(number, f"the line is not valid JSON: {error}", code="invalid_json_line")
        if not isinstance(value, dict):
            return InvalidRow(number, "the line must be a JSON object")
        custom_id, body = value.get("custom_id"), value.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            return InvalidRow(number, "custom_id must be a string that is not empty", "custom_id")
        if value.get("method") != "POST":
            return InvalidRow(number, "method must be 'POST'", "method", "invalid_method")
        if value.get("url") != self._endpoint:
            return InvalidRow(number, f"url must be the batch's endpoint, {self._endpoint!r}", "url", "mismatched_url")
        if not isinstance(body, dict):
            return InvalidRow(number, "body must be a JSON object", "body")
        if body.get("stream"):
            return InvalidRow(number, "responses of a batch cannot be streamed", "body.stream")
        seed = body.get("seed")
        seed = row_seed(self._batch_id, custom_id) if seed is None else seed
        return Row(custom_id, json.dumps({**body, "priority": None, "seed": seed}).encode(), len(self._seen))


def row_seed(batch_id: str, custom_id: str) -> int:
    """Return the seed of a row without one: 63 bits of a hash of both ids."""
    ids = f"{batch_id}\0{custom_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(ids).digest()[:8]) >> 1


def answer_row(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return a row of an output or error file."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


def unanswered_row(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the output row of a request without an answer."""
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}
