"""msgpack codec for frozen dataclasses that are messages, and the framing of streams of them.

A message is an ExtType whose code is the class's number and whose payload is the list of its fields; tuples arrive as
lists and are turned back by the class. Unknown codes and wrong field counts raise WireError: peers of another wire
version are refused by fingerprint before any message travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import msgpack

from protocol.errors import InvalidRequest, KvferryError

T = TypeVar("T")
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 8
"""Messages within messages. Each level is a call on the C stack, which hostile bytes could otherwise exhaust."""
BUFFER_BYTES = 256
"""Where a message's bytes begin to be gathered; it grows. The codec's own default, 256 KiB, costs more to get than most
messages to write."""

_UNREADABLE = (ValueError, TypeError, msgpack.UnpackException)
_UNWRITABLE = (OverflowError, ValueError, RecursionError)
_CODES: dict[type, int] = {}
_CLASSES: dict[int, type] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
"""Names of each class's fields; asking `dataclasses.fields` for every message would be its largest cost."""


class WireError(KvferryError):
    """Bytes that are no message of this wire version."""

    status, code = 400, "wire_error"


class Unwritable(InvalidRequest):
    """A value that the wire cannot carry: an integer outside 64 bits, text that is no UTF-8."""

    code = "unwritable"


def message(code: int) -> Any:
    """Class decorator: give a frozen dataclass its number (0–127, never reused) on the wire."""

    def register(cls: type[T]) -> type[T]:
        assert is_dataclass(cls), cls
        assert code not in _CLASSES, (cls, code)
        _CODES[cls], _CLASSES[code] = code, cls
        _FIELDS[cls] = tuple(field.name for field in fields(cls))
        return cls

    return register


def pack(value: Any) -> bytes:
    """Bytes of one message (or of plain lists, dicts, numbers, strings and bytes holding messages). Raises
    Unwritable."""
    try:
        return bytes(msgpack.Packer(default=_to_ext, buf_size=BUFFER_BYTES).pack(value))
    except _UNWRITABLE as error:
        raise Unwritable(f"a {type(value).__name__} cannot be sent: {error}") from error


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The value that `pack` wrote. Raises WireError."""
    return _unpack(data, 0)


def _unpack(data: bytes | bytearray | memoryview, depth: int) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=partial(_from_ext, depth=depth), raw=False, strict_map_key=False)
    except _UNREADABLE as error:
        raise WireError(f"not a message: {error}") from error


class FrameReader:
    """Messages out of a byte stream that was written as `pack(...)` after `pack(...)`."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(
            ext_hook=_from_ext, raw=False, strict_map_key=False, max_buffer_size=MAX_FRAME_BYTES
        )

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes; yield every message that is now whole. Raises WireError."""
        try:
            self._unpacker.feed(data)
            yield from self._unpacker
        except _UNREADABLE as error:
            raise WireError(f"broken stream: {error}") from error


def _to_ext(value: Any) -> Any:
    code = _CODES.get(type(value))
    if code is None:
        raise TypeError(f"{type(value).__name__} is not a message")
    return msgpack.ExtType(code, pack([getattr(value, name) for name in _FIELDS[type(value)]]))


def _from_ext(code: int, data: bytes, depth: int = 0) -> Any:
    if depth >= MAX_DEPTH:
        raise ValueError(f"messages nest deeper than {MAX_DEPTH}")
    cls = _CLASSES.get(code)
    if cls is None:
        raise ValueError(f"unknown message code {code}")
    values = _unpack(data, depth + 1)
    if not isinstance(values, list) or len(values) != len(_FIELDS[cls]):
        raise ValueError(f"a {cls.__name__} has {len(_FIELDS[cls])} fields")
    return cls(*(_tupled(value) if isinstance(value, list) else value for value in values))


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value
