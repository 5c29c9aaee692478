"""msgpack codec of wire messages: numbered classes, type checks, and a reader of messages in a byte stream.

A message is an ExtType: its code is the class's number, its payload the list of its fields. Tuples travel as lists and
are restored. Unknown codes and wrong field counts raise WireError. Fingerprints reject peers of another wire version
before any message travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from kvferry.protocol.errors import InvalidRequest, KvferryError
from kvferry.protocol.fast_init import fast_init

T = TypeVar("T")
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Maximum buffered part of a stream, in bytes."""
MAX_ITEMS = 2**22
"""Maximum number of items of one list or map, since one byte on the wire may become a hundred in memory."""
MAX_DEPTH = 8
"""Maximum nesting of messages: each level is a call on the C stack, which hostile bytes could exhaust."""
BUFFER_BYTES = 256
"""Initial size in bytes of read and write buffers, which grow.

The codec's defaults are 256 KiB for a writer and 1 MiB for a stream reader. Allocating those costs more than reading or
writing most messages."""

_NEW = tuple.__new__
"""Makes an ExtType, which is a named tuple, without its checks."""
_READING: dict[str, Any] = {
    "raw": False, "strict_map_key": False, "max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS
}  # fmt: skip
_UNREADABLE = (ValueError, TypeError, msgpack.UnpackException)
_UNWRITABLE = (OverflowError, ValueError, RecursionError)
_CODES: dict[type, int] = {}
_CLASSES: dict[int, type] = {}
_CHECKED: set[type] = set()
_PLAIN: dict[type, frozenset[type]] = {int: frozenset((int, bool)), str: frozenset((str,))}
_FIELDS: dict[type, tuple[str, ...]] = {}
"""Field names of each class; calling `dataclasses.fields` for every message would be its largest cost."""
_READ: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
"""Reader of all fields of each class at once."""
_COMPILED: dict[int, Callable[[bytes], Any]] = {}
"""Compiled decoders by code; see `compiled`."""


class WireError(KvferryError):
    """Bytes that are not a message of this wire version."""

    status, code = 400, "wire_error"


class Unwritable(InvalidRequest):
    """Value that the wire cannot carry: an integer outside 64 bits, or text that is not UTF-8."""

    code = "unwritable"


def message(code: int, *, checked: bool = False) -> Any:
    """Decorate a frozen dataclass with its number on the wire (0–127, never reused).

    checked: on arrival, raise WireError unless each field has its declared type. Messages sent for every token are not
    checked, because they are too frequent."""

    def register(cls: type[T]) -> type[T]:
        assert is_dataclass(cls), cls
        assert code not in _CLASSES, (cls, code)
        _CODES[cls], _CLASSES[code] = code, cls
        names = _FIELDS[cls] = tuple(field.name for field in fields(cls))
        _READ[cls] = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, n) for n in names)
        if checked:
            _CHECKED.add(cls)
        return fast_init(cls) if cls.__dataclass_params__.frozen else cls  # type: ignore[attr-defined]

    return register


def code_of(cls: type) -> int:
    """Return the number of a message's class on the wire."""
    return _CODES[cls]


def compiled(code: int, decode: Callable[[bytes], Any]) -> None:
    """Register `decode` for top-level messages with this number; where it returns None, this codec decodes them."""
    _COMPILED[code] = decode


def pack(value: Any) -> bytes:
    """Return the bytes of one message, or of plain lists, dicts, numbers, strings and bytes that hold messages.

    Raises Unwritable."""
    try:
        packed: bytes = msgpack.Packer(default=_to_ext, buf_size=BUFFER_BYTES).pack(value)
        return packed
    except _UNWRITABLE as error:
        raise Unwritable(f"a {type(value).__name__} cannot be sent: {error}") from error


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that `pack` wrote. Raises WireError."""
    try:
        return msgpack.unpackb(data, ext_hook=_outermost, **_READING)
    except _UNREADABLE as error:
        raise WireError(f"not a message: {error}") from error


class FrameReader:
    """Incremental parser of a byte stream of consecutive `pack(...)` outputs."""

    def __init__(self) -> None:
        self._fed = 0
        self._unpacker = msgpack.Unpacker(
            ext_hook=_outermost, read_size=BUFFER_BYTES, max_buffer_size=MAX_FRAME_BYTES, **_READING
        )

    @property
    def is_empty(self) -> bool:
        """Return whether no incomplete message is buffered."""
        return bool(self._unpacker.tell() == self._fed)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes and yield every message that is complete. Raises WireError."""
        try:
            self._fed += len(data)
            self._unpacker.feed(data)
            yield from self._unpacker
        except _UNREADABLE as error:
            raise WireError(f"broken stream: {error}") from error


def _to_ext(value: Any) -> Any:
    code = _CODES.get(type(value))
    if code is None:
        raise TypeError(f"{type(value).__name__} is not a message")
    made: bytes = msgpack.Packer(default=_to_ext, buf_size=BUFFER_BYTES).pack(_READ[type(value)](value))
    return _NEW(msgpack.ExtType, (code, made))


def _outermost(code: int, data: bytes) -> Any:
    decode = _COMPILED.get(code)
    made = decode(data) if decode is not None else None
    return made if made is not None else _from_ext(code, data)


def _from_ext(code: int, data: bytes, depth: int = 0) -> Any:
    if depth >= MAX_DEPTH:
        raise ValueError(f"messages nest deeper than {MAX_DEPTH}")
    cls = _CLASSES.get(code)
    if cls is None:
        raise ValueError(f"unknown message code {code}")
    try:
        values = msgpack.unpackb(data, ext_hook=_HOOKS[depth], use_list=False, **_READING)
    except _UNREADABLE as error:
        raise WireError(f"not a message: {error}") from error
    if not isinstance(values, tuple) or len(values) != len(_FIELDS[cls]):
        raise ValueError(f"a {cls.__name__} has {len(_FIELDS[cls])} fields")
    if cls in _CHECKED:
        for name, fits, value in zip(_FIELDS[cls], _checks(cls), values, strict=True):
            if not fits(value):
                raise ValueError(f"{cls.__name__}.{name} has the wrong type")
    return cls(*values)


def well_typed(value: Any) -> bool:
    """Return whether each field of a message has its declared type.

    It does not check the fields of nested messages."""
    cls: type = value.__class__
    for fits, each in zip(_checks(cls), _READ[cls](value), strict=True):  # noqa: SIM110 - for every message
        if not fits(each):
            return False
    return True


@cache
def _checks(cls: type) -> tuple[Callable[[Any], bool], ...]:
    """Return one type check per field of the class."""
    hints = get_type_hints(cls)
    return tuple(_check(hints[name]) for name in _FIELDS[cls])


def _check(hint: Any) -> Callable[[Any], bool]:
    parts = get_args(hint)
    if get_origin(hint) is tuple and parts[-1] is Ellipsis:
        if parts[0] in _PLAIN:  # fast path for a prompt's many tokens
            plain = _PLAIN[parts[0]]
            return lambda value: isinstance(value, tuple) and plain.issuperset(map(type, value))
        each = _check(parts[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if get_origin(hint) is tuple:
        checks = tuple(map(_check, parts))
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(checks)
            and all(fits(item) for fits, item in zip(checks, value, strict=True))
        )
    if parts:
        choices = tuple(map(_check, parts))
        return lambda value: any(fits(value) for fits in choices)
    kinds = (int, float) if hint is float else (hint,)
    return lambda value: isinstance(value, kinds)


_HOOKS = tuple(partial(_from_ext, depth=depth + 1) for depth in range(MAX_DEPTH))
"""Decoders of nested messages, by the depth of the outer one."""
