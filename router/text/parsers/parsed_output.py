"""Interface and shared code of output parsers: text, reasoning and tool calls."""

from __future__ import annotations

import random
import string
from collections.abc import Collection
from typing import ClassVar, Protocol

from kvferry.router.text.transcript import CallDelta, Found

_ALPHABET = string.ascii_letters + string.digits


class Parser(Protocol):
    """The concatenation of what all `feed` and `finish` find depends on the text alone, not on its cuts.

    Nothing raises, whatever the text. Text is held back only while it may become a call; `finish` gives back what is
    left."""

    def feed(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


def held_from(text: str, markers: Collection[str]) -> int:
    """Return where the end of `text` may begin a marker; its length if it cannot."""
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


def new_id(length: int = 0) -> str:
    """Return a new call id: like OpenAI's, or so many letters and digits."""
    return (
        "".join(random.choices(_ALPHABET, k=length)) if length else "call_" + "".join(random.choices(_ALPHABET, k=24))
    )


class CallParser:
    """Base of the families' parsers: text passes until something opens a call; the family reads what follows.

    opens         texts that open calls wherever they stand
    opens_first   the same at the output's beginning alone
    id_len        0: ids as OpenAI's; else so many letters and digits

    names are the tools that may be called: a call of another is text. patient: a call is shown once it is complete, and
    is text if it turns out malformed; otherwise its arguments are shown as they come, and what does not belong to them
    is text.

    For families: `_held` is what is not read yet, `_say` and `_call` tell what was found, `_leave` returns to text.
    `_read_call` is called while a call is open; it returns whether anything moved (False: more text is needed).
    """

    opens: ClassVar[tuple[str, ...]] = ()
    opens_first: ClassVar[tuple[str, ...]] = ()
    id_len: ClassVar[int] = 0

    def __init__(self, names: Collection[str], *, patient: bool = False) -> None:
        self._names = frozenset(names)
        self._patient = patient
        self._held = ""
        self._ended = False
        self._inside = False
        self._blank = True
        """Only blanks were read since the beginning or the last call: none are shown yet."""
        self._first = True
        """Nothing but blanks was read at all."""
        self._lead = ""
        """Blanks before what may be a call: shown if it is none."""
        self._text: list[str] = []
        self._calls: dict[int, CallDelta] = {}
        self._count = 0

    def feed(self, text: str) -> Found:
        self._held += text
        while self._read_call() if self._inside else self._read_text():
            pass
        return self._found()

    def finish(self) -> Found:
        self._ended = True
        found = self.feed("")
        if not self._held or (self._count and not self._held.strip()):
            return found
        return Found(found.text + self._held, calls=found.calls)

    def _opened(self, marker: str) -> None:
        """A call may follow; the marker was read."""
        raise NotImplementedError

    def _read_call(self) -> bool:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        self._text.append(self._lead + text)
        self._lead = ""
        self._blank = self._first = False

    def _new_call(self) -> int:
        """Index of a call that begins."""
        self._count += 1
        self._lead = ""
        return self._count - 1

    def _call(self, index: int, *, name: str = "", arguments: str = "") -> None:
        """Show more of a call; its name comes first."""
        delta = CallDelta(index, new_id(self.id_len) if name else "", name, arguments)
        known = self._calls.get(index)
        self._calls[index] = delta if known is None else known.followed_by(delta)

    def _leave(self) -> None:
        """Back to text. Blanks after a call are not shown unless text follows."""
        self._inside, self._blank = False, self._count > 0

    def _read_text(self) -> bool:
        markers = (*self.opens, *self.opens_first) if self._first else self.opens
        start = len(self._held) - len(self._held.lstrip()) if self._blank else 0
        at, marker = self._next_marker(start)
        if marker:
            if at > start:
                self._say(self._held[:at])
            else:
                self._lead = self._held[:at]
            self._held = self._held[at + len(marker) :]
            self._inside, self._first = True, False
            self._opened(marker)
            return True
        cut = len(self._held) if self._ended else held_from(self._held, markers)
        if cut > start:
            self._say(self._held[:cut])
            self._held = self._held[cut:]
        return False

    def _next_marker(self, start: int) -> tuple[int, str]:
        """The first marker and where it is; empty if there is none yet."""
        found = [(at, marker) for marker in self.opens if (at := self._held.find(marker)) >= 0]
        if self._first:
            found += [(start, marker) for marker in self.opens_first if self._held.startswith(marker, start)]
        return min(found, default=(0, ""), key=lambda pair: pair[0])

    def _found(self) -> Found:
        found = Found("".join(self._text), calls=tuple(self._calls.values()))
        self._text, self._calls = [], {}
        return found
