"""SlicedJson: parses large JSON in slices of bounded time, between which the event loop runs other work.

The library parses a text as a whole and holds the interpreter meanwhile: 0.2 s for a million numbers. Here large lists
and objects are cut at their commas into texts of WINDOW bytes, each of which the library parses."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from typing import Any

from pydantic_core import from_json

from kvferry.router.long_work import LongWork

WINDOW = 16 * 1024
"""Bytes of a slice."""
PLAIN = 64 * 1024
"""Bytes of a string that are searched for an escape or its end, or checked, in one step.

Larger pieces would be memory pages that the allocator returns to the system and requests again for each piece."""
SLICE_S = 0.0003
"""Time after which the event loop runs other work, in seconds.

A short request takes tens of turns of the loop, and waits for one slice of a large body in each of them."""
MAX_FIELDS = 2**17
"""Maximum number of fields of an object: a larger dict would take 0.03 s to rebuild when it grows."""
MAX_DEPTH = 200
"""Maximum nesting depth, the same as the library's."""
_NESTED = 6
"""Nesting of values that are found in one step."""

_STRING = rb'"(?:[^"]*+(?<!\\)"|(?=[^"]*+")(?:[^"\\]++|\\.)*+")'
"""A quote ends a string unless it is escaped; checking first for a quote after no backslash is six times as fast.

The lookahead likewise rejects a window without a quote early."""
_WITHIN = rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+"
for _ in range(_NESTED):
    _WITHIN = rb'(?:[^"\[\]{}]++|' + _STRING + rb"|[\[{]" + _WITHIN + rb"[\]}])*+"
_VALUE = rb'(?:[^"\[\]{},]++|' + _STRING + rb"|[\[{]" + _WITHIN + rb"[\]}])*+"
_ONE = re.compile(_VALUE, re.DOTALL)
_SEVERAL = re.compile(rb"(?:" + _VALUE + rb",)*+", re.DOTALL)
_KEY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:", re.DOTALL)
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_WORD = re.compile(rb'[^\s"\[\]{},]*+')
_SPACE = re.compile(rb"[ \t\r\n]*+")
_INT = frozenset((int,))

Steps = Generator[None, None, tuple[Any, int]]
"""Steps of parsing a value; they return it and the place after it."""


class TooManyFields(ValueError):
    """An object has more than MAX_FIELDS fields."""


class TooManyObjects(ValueError):
    """A text holds more lists and objects than it may."""


class Numbers(list[Any]):
    """A long list of a JSON text whose items are all integers, none a boolean, so that they need no further check."""


class SlicedJson:
    """Parser of one text; `objects` counts its lists and objects, up to just above `max_objects`.

    Raises TooManyObjects if it holds more, TooManyFields, and ValueError if it is not JSON."""

    def __init__(self, data: bytes, max_objects: int) -> None:
        self._data, self._max_objects = data, max_objects
        self.objects = 0

    async def value(self) -> Any:
        """Return the text's value; let the event loop run other work every SLICE_S."""
        steps, until, work = self._whole(), time.perf_counter() + SLICE_S, LongWork()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            if time.perf_counter() >= until:
                await work.pause()
                until = time.perf_counter() + SLICE_S

    def _whole(self) -> Generator[None, None, Any]:
        value, at = yield from self._read(0, 0)
        if self._space(at) != len(self._data):
            raise ValueError(f"trailing characters at byte {at}")
        return value

    def _read(self, at: int, depth: int) -> Steps:
        at = self._space(at)
        first = self._data[at : at + 1]
        if first in (b"[", b"{"):
            self._count(1)
            if depth >= MAX_DEPTH:
                raise ValueError(f"recursion limit exceeded at byte {at}")
            return (yield from (self._list if first == b"[" else self._object)(at + 1, depth + 1))
        text = first == b'"'
        begun, pattern = (at + 1, _TEXT) if text else (at, _WORD)
        if text:
            begun = yield from self._plain(begun)
            if begun > at + PLAIN and self._data[begun : begun + 1] == b'"':
                return (yield from self._joined(at + 1, begun)), begun + 1
        while (end := self._end(pattern, begun)) > begun:
            begun = end
            yield
        end += text
        return self._parsed(at, end), end

    def _plain(self, at: int) -> Generator[None, None, int]:
        """Return a place in a string before which nothing is escaped: its end, if it is the base64 of an image."""
        while (quote := self._data.find(b'"', at, at + PLAIN)) < 0 and at < len(self._data):
            if self._data.find(b"\\", at, at + PLAIN) >= 0:
                return at
            at = min(at + PLAIN, len(self._data))
            yield
        return at if self._data.find(b"\\", at, quote) >= 0 else max(at, quote)

    def _joined(self, at: int, end: int) -> Generator[None, None, str]:
        """Parse a string in which nothing is escaped, in pieces.

        The text grows in place, since nothing else refers to it. A copy in the end would take 12 ms for 16 MiB."""
        text = ""
        while at < end:
            to = min(at + PLAIN, end)
            if to < end:  # a piece ends between two characters, which have at most four bytes
                to -= next((back for back in range(4) if self._data[to - back] & 0xC0 != 0x80), 0)
            text += _parsed_alone(b'"%b"' % self._data[at:to], at)
            at = to
            yield
        return text

    def _list(self, at: int, depth: int) -> Steps:
        items, plain, begun = Numbers(), True, at
        while True:
            found, end, ends = self._some(at, b"[", b"]", may_be_empty=at == begun)
            if ends or end > at:
                items += found
                plain = plain and _INT.issuperset(map(type, found))
                if ends:
                    return (items if plain else list(items)), end
                at = end
            else:
                value, at = yield from self._read(at, depth)
                items.append(value)
                plain = plain and type(value) is int
                at, ends = self._next_item(at, b"]")
                if ends:
                    return (items if plain else list(items)), at
            yield

    def _object(self, at: int, depth: int) -> Steps:
        fields, begun = dict[str, Any](), at
        while True:
            found, end, ends = self._some(at, b"{", b"}", may_be_empty=at == begun)
            if len(fields) > MAX_FIELDS:
                raise TooManyFields
            if ends or end > at:
                fields |= found
                if ends:
                    return fields, end
                at = end
            else:
                key = _KEY.match(self._data, at)
                if key is None:
                    raise ValueError(f"expected a field at byte {at}")
                name = self._parsed(*key.span(1))
                fields[name], at = yield from self._read(key.end(), depth)
                at, ends = self._next_item(at, b"}")
                if ends:
                    return fields, at
            yield

    def _some(self, at: int, opens: bytes, closes: bytes, *, may_be_empty: bool) -> tuple[Any, int, bool]:
        """Return the next items of a list or object, the place after them, and whether they are its last.

        The place is `at` if the next item is too long for a slice. may_be_empty: no item came before."""
        end = self._end(_SEVERAL, at)
        if end > at:
            return self._parsed(at, end - 1, opens, closes), end, False
        end = self._end(_ONE, at)
        if end >= at + WINDOW or self._data[end : end + 1] != closes:
            return (), at, False
        if may_be_empty and not self._data[at:end].strip(b" \t\r\n"):
            return (), end + 1, True
        return self._parsed(at, end, opens, closes), end + 1, True

    def _next_item(self, at: int, closes: bytes) -> tuple[int, bool]:
        """Return the place after the `,` or bracket that follows a value, and whether the list or object ends there."""
        at = self._space(at)
        follows = self._data[at : at + 1]
        if follows not in (b",", closes):
            raise ValueError(f"expected `,` or `{closes.decode()}` at byte {at}")
        return at + 1, follows == closes

    def _parsed(self, at: int, end: int, opens: bytes = b"", closes: bytes = b"") -> Any:
        """Parse a part of the text, in these brackets."""
        part = self._data[at:end]
        value = _parsed_alone(opens + part + closes, at)
        if opens and not value:
            raise ValueError(f"expected a value at byte {at}")
        if opens and (b"[" in part or b"{" in part):
            self._count(objects_in(value, self._max_objects) - 1)
        return value

    def _count(self, more: int) -> None:
        self.objects += more
        if self.objects > self._max_objects:
            raise TooManyObjects

    def _end(self, pattern: re.Pattern[bytes], at: int) -> int:
        found = pattern.match(self._data, at, at + WINDOW)
        assert found is not None  # all patterns match nothing, too
        return found.end()

    def _space(self, at: int) -> int:
        """Return the place after white space."""
        while (end := self._end(_SPACE, at)) == at + WINDOW:
            at = end
        return end


def _parsed_alone(part: bytes, at: int) -> Any:
    try:
        return from_json(part)
    except ValueError as error:
        raise ValueError(f"{error} (of the part that begins at byte {at})") from None


def objects_in(value: Any, max_objects: int) -> int:
    """Count the lists and objects of a JSON value, up to just above `max_objects`.

    Counting brackets in the text would include those in strings."""
    found, waiting = 0, [value]
    while waiting and found <= max_objects:
        items = waiting.pop()
        if isinstance(items, dict):
            items = items.values()
        elif not isinstance(items, list):
            continue
        found += 1
        waiting += [item for item in items if isinstance(item, list | dict)]
    return found
