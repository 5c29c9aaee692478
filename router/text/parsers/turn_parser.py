"""TurnParser: splits an output into reasoning, text and tool calls with two parsers; Reader, their interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.reasoning import ReasoningParser
from kvferry.router.text.transcript import Parsed


class Reader(Protocol):
    """Incremental reader like CallParser, but one text may yield several parts in order."""

    @property
    def thinks(self) -> bool:
        """Return whether the text is within reasoning."""

    @property
    def may_think(self) -> bool:
        """Return whether the next text is or may be reasoning."""

    def expect_grammar(self, marker: str) -> None:
        """Take note that a grammar bounds the output behind the next such marker; see CallParser.govern."""

    def feed(self, text: str) -> list[Parsed]:
        """Parse more text and return the parts found."""

    def finish(self, *, is_whole: bool = False) -> list[Parsed]:
        """End the text and return the remaining parts. See CallParser.finish."""


class TurnParser:
    """Reader of reasoning, then text with calls, with more reasoning behind calls; either parser may be missing.

    Implements `router.text.parsers.turn_parser.Reader`."""

    def __init__(self, thought: ReasoningParser | None, calls: CallParser | None) -> None:
        self._thought, self._calls = thought, calls

    @property
    def thinks(self) -> bool:
        return self._thought is not None and self._thought.inside

    @property
    def may_think(self) -> bool:
        may_follow = self._calls is not None and self._calls.may_pause
        return may_follow or (self._thought is not None and self._thought.open)

    def expect_grammar(self, marker: str) -> None:
        if self._calls is not None:
            self._calls.expect_grammar(marker)

    def feed(self, text: str) -> list[Parsed]:
        found, reasoning = list[Parsed](), ""
        while True:
            if self._thought is not None:
                before = self._thought.feed(text)
                text, reasoning = before.text, before.reasoning
            if self._calls is None:
                return [Parsed(text, reasoning)]
            found.append(replace(self._calls.feed(text), reasoning=reasoning))
            if not self._calls.paused:
                return found
            text = self._restart_reasoning()

    def finish(self, *, is_whole: bool = False) -> list[Parsed]:
        found = list[Parsed]()
        while True:
            before = Parsed() if self._thought is None else self._thought.finish()
            if self._calls is None:
                return [before]
            found.append(replace(self._calls.feed(before.text), reasoning=before.reasoning))
            if not self._calls.paused:
                found.append(self._calls.finish(is_whole=is_whole))
            if not self._calls.paused:
                return found
            found += self.feed(self._restart_reasoning())

    def _restart_reasoning(self) -> str:
        """Begin another reasoning; return the text that begins with it."""
        assert self._thought is not None
        assert self._calls is not None
        self._thought = self._thought.again()
        return self._calls.resume()
