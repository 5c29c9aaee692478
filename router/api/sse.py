"""Server-sent events."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

from pydantic_core import to_json

DONE = b"data: [DONE]\n\n"


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return to_json(value)


def event(value: Any) -> bytes:
    """One event whose data is `value` in JSON."""
    return b"data: " + dump(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """One event under the name that its data has as `type`."""
    return f"event: {value['type']}\n".encode() + event(value)


class TextEvent:
    """An event that is the same every time except for one text in it: nearly every chunk of a stream is one.

    `shape` holds the placeholder SLOT where the text belongs, once. `under` is the event's name, if it has one.
    """

    SLOT = "\x00slot\x00"
    _SLOT = dump(SLOT)

    def __init__(self, shape: Any, under: str = "") -> None:
        self._head, self._tail = event(shape).split(self._SLOT)
        self._head = (f"event: {under}\n".encode() if under else b"") + self._head

    def fill(self, text: str) -> bytes:
        return self._head + encode_basestring(text).encode() + self._tail
