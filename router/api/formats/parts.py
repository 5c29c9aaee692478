"""Splits an answer into ordered parts (reasoning, text, tool calls) for the Responses and Messages APIs.

The formats of responses and messages name the part that each event belongs to. They are written in steps: a part opens,
grows and ends before the next one opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from kvferry.router.text.transcript import CallDelta, Entry, Piece

TEXT, REASONING, CALL = "text", "reasoning", "call"
Step = tuple[Literal["open", "grow", "end"], "Part", str, list[Entry]]
"""Kind of step, the part, the text it grows by, and that text's log-probabilities."""


@dataclass(slots=True)
class Part:
    """One part of an answer; `index` counts all parts.

    For a call, `number` is its index among the answer's calls, `name` its function, and `text` its arguments in JSON.
    """

    index: int
    kind: str
    number: int = 0
    call_id: str = ""
    name: str = ""
    _texts: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self._texts)

    def grow(self, text: str) -> None:
        """Append text."""
        self._texts.append(text)

    def arguments(self) -> dict[str, Any]:
        """Return a call's arguments; empty if the text is not a JSON object, as in a truncated call."""
        try:
            found = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class Parts:
    """Parts of one choice, built from its pieces in order.

    `all` are the parts so far. `finish_reason` and `stop_reason` are set after the last piece. Calls follow one
    another: a call that grows is the last one opened."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._open: Part | None = None
        self._waiting: list[Entry] = []

    @property
    def called(self) -> bool:
        """Return whether a part is a call."""
        return any(part.kind == CALL for part in self.all)

    def is_text(self, piece: Piece) -> bool:
        """Return whether the piece only extends the open text, as most pieces do."""
        return (
            self._open is not None
            and self._open.kind == TEXT
            and not (piece.entries or piece.calls or piece.reasoning or piece.finish_reason is not None)
        )

    def grow(self, text: str) -> Part:
        """Add a piece for which `is_text` is true; return the part."""
        assert self._open is not None
        self._open.grow(text)
        return self._open

    def add(self, piece: Piece) -> Iterator[Step]:
        """Yield the steps of a piece; the last piece ends the open part, and an empty answer gets an empty text."""
        self._waiting += piece.entries
        for found in piece.row or (piece,):
            if found.reasoning:
                yield from self._grow(REASONING, found.reasoning)
            if found.text:
                yield from self._grow(TEXT, found.text)
            for call in found.calls:
                yield from self._grow(CALL, call.arguments, call)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            if not self.all:
                yield from self._grow(TEXT, "")
            yield from self._end()

    def _grow(self, kind: str, text: str, call: CallDelta | None = None) -> Iterator[Step]:
        part = self._open
        if part is None or part.kind != kind or (call is not None and part.number != call.index):
            yield from self._end()
            part = self._open = Part(len(self.all), kind)
            if call is not None:
                part.number, part.call_id, part.name = call.index, call.id, call.name
            self.all.append(part)
            yield "open", part, "", []
        entries, self._waiting = self._waiting, []
        if kind != TEXT:
            entries = []
        if text or entries:
            part.grow(text)
            part.entries += entries
            yield "grow", part, text, entries

    def _end(self) -> Iterator[Step]:
        part, self._open = self._open, None
        if part is not None:
            yield "end", part, "", []
