"""Encodes JSON and server-sent events, with a template for events that differ only in a text."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

from pydantic_core import to_json

DONE = b"data: [DONE]\n\n"
"""Last event of an OpenAI stream."""
COMMENT = b": keep-alive\n"
"""Comment, which parsers of events ignore.

No empty line follows: some clients read one as the end of an event without data once an event had an id."""


def dump(value: Any) -> bytes:
    """Encode a value as compact JSON in UTF-8."""
    return to_json(value)


def event(value: Any) -> bytes:
    """Encode one event whose data is `value` in JSON."""
    return b"data: " + dump(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Encode one event named after its data's `type`."""
    return f"event: {value['type']}\n".encode() + event(value)


class TextEvent:
    """Event template with one variable text, for the most frequent chunks of a stream.

    `shape` holds the placeholder SLOT once, in the text's place. `under` is the event's name, if any. An event is a
    text escaped for JSON between `head` and `tail`."""

    SLOT = "\x00slot\x00"
    _SLOT = dump(SLOT)

    def __init__(self, shape: Any, under: str = "") -> None:
        head, tail = event(shape).split(self._SLOT)
        self.head = (f"event: {under}\n".encode() if under else b"") + head + b'"'
        self.tail = b'"' + tail

    def fill(self, text: str) -> bytes:
        """Return the event with this text."""
        return self.head + encode_basestring(text)[1:-1].encode() + self.tail
