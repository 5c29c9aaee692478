"""EventIds: writes ids into a stream's events, and skips those that a resuming client already has.

An id names the journal and how many tokens of each choice went into the stream, so that it does not depend on how they
were grouped: `<name>:<count>[,<count>…]`. `-<k>` after a count: k more events follow at this count. `+<k>` at the end:
k of the stream's last events were sent."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.protocol.errors import InvalidRequest

HEADER = "Last-Event-ID"
_COUNT = r"\d{1,9}(?:-\d{1,4})?"
_ID = re.compile(rf"(?P<name>[^\s:]+(?::[^\s:]+)*?):(?P<counts>{_COUNT}(?:,{_COUNT})*)(?:\+(?P<closed>\d{{1,4}}))?")
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position in a stream: each choice's number of tokens and of further events at this count.

    closed: number of the stream's last events that were sent."""

    counts: tuple[tuple[int, int], ...]
    closed: int = 0


def parsed_id(text: str) -> tuple[str, StreamPosition]:
    """Return the name of an event id's journal, and the position. Raises InvalidRequest naming the header."""
    found = _ID.fullmatch(text) if len(text) <= 16_384 else None
    if found is None:
        raise InvalidRequest(f"{HEADER}: {text[:64]!r} is not an event id of this server", param=HEADER)
    counts = [each.partition("-") for each in found["counts"].split(",")]
    return found["name"], StreamPosition(tuple((int(a), int(b or 0)) for a, _, b in counts), int(found["closed"] or 0))


class EventIds:
    """Writes the ids of one stream's events, and drops those that the client has.

    Tokens up to the counts in `after`, and the first token of each choice, must come one at a time."""

    def __init__(self, name: str, choices: int, after: StreamPosition | None = None) -> None:
        self._head = f"id: {name}:".encode()
        self._counts, self._after = [0] * choices, after
        if after is not None and len(after.counts) != choices:
            raise InvalidRequest(f"{HEADER}: it must have {choices} counts", param=HEADER)
        self._is_plain = choices == 1 and after is None

    def singly(self, choice: int) -> int:
        """Return the count up to which the tokens of a choice must come one at a time."""
        return max(1, self._after.counts[choice][0] if self._after else 0)

    def mark(self, choice: int, tokens: int, events: bytes) -> bytes:
        """Return the events with their ids, without those that the client has.

        tokens: number of the choice's tokens that went into the stream with them."""
        self._counts[choice] += tokens
        if self._is_plain and events.count(_END) == 1:
            return b"%b%d\n%b" % (self._head, self._counts[0], events)
        if not events:
            return events
        parts = [each + _END for each in events.split(_END)[:-1]]
        first = len(parts) - self._new_events(choice, len(parts))
        return b"".join(
            b"%b%b\n%b" % (self._head, self._counts_at(choice, len(parts) - 1 - position), parts[position])
            for position in range(first, len(parts))
        )

    def close(self, events: bytes) -> bytes:
        """Return the last events of the stream with their ids, without those that the client has."""
        parts = [each + _END for each in events.split(_END)[:-1]]
        first = self._after.closed if self._after else 0
        at = self._counts_at(0, 0)
        return b"".join(
            b"%b%b+%d\n%b" % (self._head, at, position + 1, parts[position]) for position in range(first, len(parts))
        )

    def _new_events(self, choice: int, events: int) -> int:
        """Return how many of the last events at the choice's count the client does not have."""
        count, later = self._after.counts[choice] if self._after else (0, 0)
        if self._counts[choice] != count or not count:
            return events if self._counts[choice] >= count else 0
        return min(later, events)

    def _counts_at(self, choice: int, later: int) -> bytes:
        counts = [b"%d" % count for count in self._counts]
        if later:
            counts[choice] += b"-%d" % later
        return b",".join(counts)
