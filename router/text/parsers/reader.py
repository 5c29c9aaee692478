"""Turn: splits an output into reasoning, text and tool calls with two parsers; Reader, the protocol for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvferry.router.text.parsers.parsed_output import Parser
from kvferry.router.text.parsers.reasoning import ReasoningParser
from kvferry.router.text.transcript import Found


class Reader(Protocol):
    """Incremental reader like Parser, but one text may yield several parts in order."""

    @property
    def thinks(self) -> bool:
        """Return whether the text is within reasoning."""

    @property
    def may_think(self) -> bool:
        """Return whether the next text is or may be reasoning."""

    def feed(self, text: str) -> list[Found]:
        """Parse more text and return the parts found."""

    def finish(self, *, is_whole: bool = False) -> list[Found]:
        """End the text and return the remaining parts. See Parser.finish."""


class Turn:
    """Reader of reasoning, then text with calls; either parser may be missing.

    Implements `router.text.parsers.reader.Reader`."""

    def __init__(self, thought: ReasoningParser | None, calls: Parser | None) -> None:
        self._thought, self._calls = thought, calls

    @property
    def thinks(self) -> bool:
        return self._thought is not None and self._thought.inside

    @property
    def may_think(self) -> bool:
        return self._thought is not None and self._thought.open

    def feed(self, text: str) -> list[Found]:
        reasoning = ""
        if self._thought is not None:
            before = self._thought.feed(text)
            text, reasoning = before.text, before.reasoning
        if self._calls is None:
            return [Found(text, reasoning)]
        return [replace(self._calls.feed(text), reasoning=reasoning)]

    def finish(self, *, is_whole: bool = False) -> list[Found]:
        before = Found() if self._thought is None else self._thought.finish()
        if self._calls is None:
            return [before]
        return [Found(reasoning=before.reasoning), self._calls.feed(before.text), self._calls.finish(is_whole=is_whole)]
