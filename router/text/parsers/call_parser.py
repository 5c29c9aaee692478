"""CallParser: base of the tool-call parsers, which passes text through until a marker opens a call."""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Collection
from typing import Protocol

from kvferry.router.text.transcript import CallDelta, Parsed

_ALPHABET = string.ascii_letters + string.digits


class ReadCall(Protocol):
    """A call that is being read: whether it is complete, and if so, whether its arguments are a JSON object."""

    @property
    def done(self) -> bool: ...
    @property
    def valid(self) -> bool: ...


def held_from(text: str, markers: Collection[str]) -> int:
    """Return where the end of `text` may begin a marker; its length if it cannot."""
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


def new_id(length: int = 0) -> str:
    """Return a new call id: like OpenAI's, or `length` letters and digits."""
    return (
        "".join(random.choices(_ALPHABET, k=length)) if length else "call_" + "".join(random.choices(_ALPHABET, k=24))
    )


def derived_id(like: str, request: str, index: int) -> str:
    """Return the id of a request's call number `index`, in the form of `like`, the same in every router."""
    prefix = "call_" if like.startswith("call_") else ""
    drawn = hashlib.blake2b(f"{request}:{index}".encode()).digest()
    return prefix + "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in drawn[: len(like) - len(prefix)])


class CallParser:
    """Base of the families' parsers: passes text through until a marker opens a call, which the family reads.

    The concatenated results depend on the text alone, not on its cuts. It never raises. It holds text back only while
    it may become a call.

    opens        markers that open calls anywhere
    opens_first  markers that open calls at the beginning of the output, or behind reasoning between calls
    id_len       length of call ids; 0: ids like OpenAI's
    paused       reasoning has begun behind a call, or may have begun within text; `resume` returns the unread text
    is_unsure    it may have begun within text

    `names` are the tools that may be called; a call of another is text. `patient`: a call is shown once complete, and
    as text if malformed. Otherwise its arguments are shown as they arrive, and text after them is ordinary text.
    `thoughts`: marks with which reasoning begins.

    Families use `_held` (unread text), `_emit_text` and `_call` (results), and `_end_call` (return to text).
    `_read_call` is called while a call is open and returns whether it made progress; False: it needs more text."""

    opens: tuple[str, ...] = ()
    opens_first: tuple[str, ...] = ()
    id_len: int = 0
    _closers: tuple[str, ...] = ()
    """Those of `opens` that only end text."""

    def __init__(self, names: Collection[str], *, patient: bool = False, thoughts: tuple[str, ...] = ()) -> None:
        self._names = frozenset(names)
        self._patient, self._thoughts = patient, thoughts
        self._grammar_marker = ""
        self.paused = self.is_unsure = False
        self._held = ""
        self._ended = self._whole = False
        self._inside = False
        self._blank = True
        """True while only blanks were read since the beginning or the last call; they are not shown yet."""
        self._first = True
        """True while only blanks were read, in all or behind reasoning."""
        self._lead = ""
        """Blanks before a possible call, shown if it is none."""
        self._text: list[str] = []
        self._calls: dict[int, CallDelta] = {}
        self._count = 0

    @property
    def may_pause(self) -> bool:
        """Return whether reasoning may follow text or calls."""
        return bool(self._thoughts)

    def expect_grammar(self, marker: str) -> None:
        """Take note that a grammar bounds the output behind the next such marker, so that no call is malformed."""
        self._grammar_marker = marker

    def resume(self) -> str:
        """Return the unread text, which begins with a mark of reasoning; go on with the text that is fed next."""
        rest, self._held = self._held, ""
        if not self.is_unsure:
            rest, self._first = rest.lstrip(), True
        self.paused = self.is_unsure = False
        return rest

    def begins_call(self, text: str) -> bool | None:
        """Return whether a call follows, which a mark opens anywhere; None: more text will tell."""
        rest, markers = text.lstrip(), [marker for marker in self.opens if marker not in self._closers]
        if rest.startswith(tuple(markers)):
            return True
        return None if any(marker.startswith(rest) for marker in markers) else False

    def pass_over(self, text: str) -> Parsed:
        """Show text as it is, without looking for calls in it."""
        self._emit_text(text)
        return self._found()

    def feed(self, text: str) -> Parsed:
        """Parse more text and return what was found."""
        self._held += text
        while not self.paused and (self._read_call() if self._inside else self._read_text()):
            pass
        return self._found()

    def finish(self, *, is_whole: bool = False) -> Parsed:
        """End the text and return the rest. is_whole: the model itself ended it, so that an open call is malformed."""
        self._ended, self._whole = True, is_whole
        found = self.feed("")
        if self.paused or not self._held or (self._count and not self._held.strip()):
            return found
        return Parsed(found.text + self._held, calls=found.calls)

    def _opened(self, marker: str) -> None:
        """Begin a possible call after its marker was read."""
        raise NotImplementedError

    def _read_call(self) -> bool:
        raise NotImplementedError

    def _emit_text(self, text: str) -> None:
        self._text.append(self._lead + text)
        self._lead = ""
        self._blank = self._first = False

    def _new_call(self) -> int:
        """Return the index of a new call."""
        self._count += 1
        self._lead = ""
        return self._count - 1

    def _call(self, index: int, *, name: str = "", arguments: str = "") -> None:
        """Show more of a call; its name comes first."""
        delta = CallDelta(index, new_id(self.id_len) if name else "", name, arguments)
        known = self._calls.get(index)
        self._calls[index] = delta if known is None else known.followed_by(delta)

    def _is_malformed(self, call: ReadCall) -> bool:
        """Return whether a call becomes text if none of it was shown."""
        return self._patient and (not call.valid if call.done else self._whole)

    def _end_call(self) -> None:
        """Return to text; blanks after a call are shown only if text follows."""
        self._inside, self._blank = False, self._count > 0

    def _read_text(self) -> bool:
        markers = (*self.opens, *self.opens_first) if self._first else self.opens
        start = len(self._held) - len(self._held.lstrip()) if self._blank else 0
        if self._blank and self._count:
            self.paused = self._held.startswith(self._thoughts, start)
            if self.paused or (not self._ended and any(each.startswith(self._held[start:]) for each in self._thoughts)):
                return False
        at, marker = self._next_marker(start)
        if self._pause_within_text(start, at if marker else len(self._held)):
            return False
        if marker:
            self._patient = self._patient and marker != self._grammar_marker
            if at > start:
                self._emit_text(self._held[:at])
            else:
                self._lead = self._held[:at]
            self._held = self._held[at + len(marker) :]
            self._inside, self._first = True, False
            self._opened(marker)
            return True
        cut = len(self._held) if self._ended else held_from(self._held, (*markers, *self._thoughts))
        if cut > start:
            self._emit_text(self._held[:cut])
            self._held = self._held[cut:]
        return False

    def _pause_within_text(self, start: int, end: int) -> bool:
        """Pause before a mark of reasoning between these positions; return whether there is one."""
        found = [at for mark in self._thoughts if (at := self._held.find(mark, start, end)) >= 0]
        if not found:
            return False
        at = min(found)
        if at > start:
            self._emit_text(self._held[:at])
        else:
            self._lead = self._held[:at]
        self._held = self._held[at:]
        self.paused = self.is_unsure = True
        return True

    def _next_marker(self, start: int) -> tuple[int, str]:
        """Return the position and text of the first marker; (0, "") if there is none yet."""
        found = [(at, marker) for marker in self.opens if (at := self._held.find(marker)) >= 0]
        if self._first:
            found += [(start, marker) for marker in self.opens_first if self._held.startswith(marker, start)]
        return min(found, default=(0, ""), key=lambda pair: pair[0])

    def _found(self) -> Parsed:
        found = Parsed("".join(self._text), calls=tuple(self._calls.values()))
        self._text, self._calls = [], {}
        return found
