"""ForcedEnd: ends a structured output before max_tokens cuts it, along a short path to a valid end.

For JSON it closes open brackets and writes required values as short as the schema allows. It also ends a tool call
around the JSON. The path depends on the matcher's state only. Free text is not steered: it may be cut anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from kvferry.protocol.errors import GrammarFailed
from kvferry.structured_output.interface import Matcher, empty_mask, without

LAST = 64
"""Remaining tokens at which the first path is searched."""
SPARE = 4
"""Tokens to spare when an output begins to close: a token drawn freely may have made the path longer."""
PART = 16
"""Tokens beyond SPARE that an object or array may need: with fewer left, none begins if another value is allowed."""
_TEXT = 4096
"""Number of allowed tokens above which the output is within a JSON string, where brackets close nothing."""
_FEW = 512
"""Number of allowed tokens up to which the longest is taken: the rest of a name, a word of several tokens."""
_PIECE = 256
"""Bytes of a mask that are read as one number."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Single tokens of a vocabulary that lead to an output's end.

    The first allowed token of a kind is taken. `closers` close an object or array, `next` leads to the next value,
    `fillers` are taken where neither is allowed and many other tokens are. text: a token's bytes. words: words of a
    mask."""

    quote: tuple[int, ...]
    closers: tuple[int, ...]
    next: tuple[int, ...]
    fillers: tuple[int, ...]
    eos: tuple[int, ...]
    text: Callable[[int], bytes]
    words: int


def marks_of(
    tokenize: Callable[[str], Sequence[int]], text: Callable[[int], bytes], eos: tuple[int, ...], words: int
) -> Marks:
    """Find the marks of a vocabulary. tokenize: returns a text's tokens."""

    def singles(texts: str) -> tuple[int, ...]:
        found = (tokenize(text) for text in texts)
        return tuple(ids[0] for ids in found if len(ids) == 1)

    return Marks(singles('"'), singles("}]"), singles("),:"), singles("@. 0a1b-A"), eos, text, words)


class ForcedEnd:
    """Forced end of one output, alongside its matcher.

    It searches a path only a few times, with `look` tokens left or fewer: a search costs one mask per token of the
    path."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self.look = marks, LAST

    def token(self, room: int, explorer: Callable[[], Matcher]) -> int | None:
        """Return the token to take now so that the output ends within `room` tokens, its end included.

        None: any token may follow, the output ends here in any case, or no path is short enough. explorer: returns
        another matcher in the same state."""
        if room > self.look:
            return None
        bits, marks = empty_mask(self._marks.words), self._marks
        matcher = explorer()
        with suppress(GrammarFailed):
            matcher.mask(bits)
        if _is_free(bits, marks):
            self.look = room - PART // 2  # a tool call may begin in it
            return None
        opens = _may_open(bits, marks)
        path = _way_out(matcher, marks, bits, room - 1)
        if path is None:
            self.look = room // 2  # what comes next may be simpler
            return None
        spare = room - 1 - SPARE - len(path)
        self.look = room - 1 - max(0, spare - PART) // 2
        if not path:
            ends = [token for token in marks.eos if _allows(bits, token)]
            return None if _goes_on(matcher, marks, without(bits, ends), spare) else ends[0]
        if spare > PART or (spare > 0 and not (opens and not _opens(marks.text(path[0])))):
            return None
        return path[0]


def _goes_on(matcher: Matcher, marks: Marks, bits: array[int], spare: int) -> bool:
    """Return whether an output that may end here can continue and still end in time.

    A number may have more digits, and a call may follow a call. bits: the tokens with which it may continue. If there
    are none, True unless no token is to spare, so that every node that continues the output decides alike."""
    token = _choose(bits, marks)
    if token is None:
        return spare > 0
    return spare > 0 and matcher.accept([token]) == 1 and _way_out(matcher, marks, bits, spare - 1) is not None


def _is_free(bits: array[int], marks: Marks) -> bool:
    """Return whether the output is in a text that may end anywhere."""
    return _count(bits) > _TEXT and any(_allows(bits, token) for token in marks.eos)


def _way_out(matcher: Matcher, marks: Marks, bits: array[int], longest: int) -> list[int] | None:
    """Return at most `longest` tokens that lead to where the output may end, or None."""
    path: list[int] = []
    with suppress(GrammarFailed):
        while True:
            matcher.mask(bits)
            if any(_allows(bits, token) for token in marks.eos):
                return path
            token = _choose(bits, marks) if len(path) < longest else None
            if token is None or not matcher.accept([token]):
                return None
            path.append(token)
    return None


def _allows(bits: array[int], token: int) -> bool:
    return bool(bits[token >> 5] >> (token & 31) & 1)


def _count(bits: array[int]) -> int:
    return int.from_bytes(bits.tobytes(), "little").bit_count()


def _choose(bits: array[int], marks: Marks) -> int | None:
    count = _count(bits)
    if count > _TEXT:
        order = marks.quote + marks.fillers
    else:
        order = marks.closers + marks.quote + marks.next + (marks.fillers if count > _FEW else ())
    found = next((token for token in order if _allows(bits, token)), None)
    if found is not None:
        return found
    return max(_allowed(bits), key=lambda token: _reach(marks.text(token)), default=None)


def _allowed(bits: array[int]) -> Iterator[int]:
    """Return the first _TEXT allowed tokens."""
    return islice(_tokens(bits.tobytes()), _TEXT)


def _tokens(mask: bytes) -> Iterator[int]:
    for at in range(0, len(mask), _PIECE):
        left = int.from_bytes(mask[at : at + _PIECE], "little")
        while left:
            lowest = left & -left
            yield 8 * at + lowest.bit_length() - 1
            left ^= lowest


def _may_open(bits: array[int], marks: Marks) -> bool:
    """Return whether an object or array may begin here, outside of a JSON string."""
    return _count(bits) <= _TEXT and any(_opens(marks.text(token)) for token in _allowed(bits))


def _opens(text: bytes) -> bool:
    return text.lstrip().startswith((b"{", b"["))


def _reach(text: bytes) -> tuple[bool, bool, int]:
    """Rank a token: longer is better; a trailing sign or point needs more; digits may go on for ever."""
    return not text.endswith((b"-", b".")), not text.strip().isdigit(), len(text)
