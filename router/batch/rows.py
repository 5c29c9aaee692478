"""Input and output rows of a batch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

MAX_ROWS = 50_000
"""Largest number of rows in a batch."""
LONGEST_ROW = 16 * 2**20
"""Longest line, in bytes; reading one holds the interpreter lock and so delays the event loop."""
MAX_ERRORS = 100
"""Largest number of invalid lines reported."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request; `body` is JSON bytes without a priority, since batches run after all other requests."""

    custom_id: str
    body: bytes


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


def read_rows(path: Path, endpoint: str) -> Iterator[Row | InvalidRow]:
    """Yield every line that is not blank, up to the first that is too long; blocks."""
    seen: set[str] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_ROW + 1), b""), start=1):
            if len(line) > LONGEST_ROW:
                yield InvalidRow(number, f"the line is longer than {LONGEST_ROW} bytes", code="line_too_long")
                return
            if not line.strip():
                continue
            row = _row(number, line, endpoint)
            if isinstance(row, Row) and row.custom_id in seen:
                row = InvalidRow(
                    number, f"custom_id {row.custom_id!r} is used twice", "custom_id", "duplicate_custom_id"
                )
            elif isinstance(row, Row):
                seen.add(row.custom_id)
                if len(seen) > MAX_ROWS:
                    yield InvalidRow(number, f"a batch takes at most {MAX_ROWS} requests", None, "too_many_requests")
                    return
            yield row


def _row(number: int, line: bytes, endpoint: str) -> Row | InvalidRow:
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
    if value.get("url") != endpoint:
        return InvalidRow(number, f"url must be the batch's endpoint, {endpoint!r}", "url", "mismatched_url")
    if not isinstance(body, dict):
        return InvalidRow(number, "body must be a JSON object", "body")
    if body.get("stream"):
        return InvalidRow(number, "responses of a batch cannot be streamed", "body.stream")
    return Row(custom_id, json.dumps({**body, "priority": None}).encode())


def answer_row(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return a row of an output or error file."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}


def unanswered_row(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Return the output row of a request that was not answered."""
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}


def answered(path: Path) -> set[str]:
    """Return the ids in a partly written output, and cut off an incomplete last line; blocks."""
    if not path.exists():
        return set()
    found, whole = set(), 0
    with path.open("r+b") as lines:
        for line in lines:
            try:
                found.add(str(json.loads(line)["custom_id"]))
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        lines.truncate(whole)
    return found
