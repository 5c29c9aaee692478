"""TurnParser: splits an output into reasoning, text and tool calls with two parsers; Reader, their interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.held_thought import HeldThought
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

    @property
    def holds_thought(self) -> bool:
        """Return whether the text is within what may be reasoning, and is held until that is decided."""

    @property
    def is_undecided(self) -> bool:
        """Return whether it is undecided if held text is reasoning."""

    def expect_grammar(self, marker: str) -> None:
        """Take note that a grammar bounds the output behind the next such marker; see CallParser.govern."""

    def feed(self, text: str) -> list[Parsed]:
        """Parse more text and return the parts found."""

    def finish(self, *, is_whole: bool = False) -> list[Parsed]:
        """End the text and return the remaining parts. See CallParser.finish."""


class TurnParser:
    """Reader of reasoning, then text with calls, with more reasoning before and behind calls.

    Either parser may be missing. Reasoning behind text is reasoning only if a call follows it (HeldThought).
    Implements `router.text.parsers.turn_parser.Reader`."""

    def __init__(self, thought: ReasoningParser | None, calls: CallParser | None) -> None:
        self._thought, self._calls = thought, calls
        self._held: HeldThought | None = None

    @property
    def thinks(self) -> bool:
        return self._thought is not None and self._thought.inside

    @property
    def may_think(self) -> bool:
        may_follow = self._calls is not None and self._calls.may_pause
        return may_follow or (self._thought is not None and self._thought.open)

    @property
    def holds_thought(self) -> bool:
        return self._held is not None and self._held.is_open

    @property
    def is_undecided(self) -> bool:
        return self._held is not None

    def expect_grammar(self, marker: str) -> None:
        if self._calls is not None:
            self._calls.expect_grammar(marker)

    def feed(self, text: str) -> list[Parsed]:
        return self._feed(text, ended=False)

    def finish(self, *, is_whole: bool = False) -> list[Parsed]:
        found = self._feed("", ended=True) if self._held is not None else []
        while True:
            before = Parsed() if self._thought is None else self._thought.finish()
            if self._calls is None:
                return [before]
            found.append(replace(self._calls.feed(before.text), reasoning=before.reasoning))
            if not self._calls.paused:
                found.append(self._calls.finish(is_whole=is_whole))
            if not self._calls.paused:
                return found
            found += self._feed(self._resume(), ended=True)

    def _feed(self, text: str, *, ended: bool) -> list[Parsed]:
        found = list[Parsed]()
        while True:
            if self._held is not None:
                shown, rest = self._decide(text, ended)
                if rest is None:
                    return found
                found, text = found + shown, rest
            reasoning = ""
            if self._thought is not None:
                before = self._thought.feed(text)
                text, reasoning = before.text, before.reasoning
            if self._calls is None:
                return [Parsed(text, reasoning)]
            found.append(replace(self._calls.feed(text), reasoning=reasoning))
            if not self._calls.paused:
                return found
            text = self._resume()

    def _resume(self) -> str:
        """Begin another reasoning, or hold it if it is not sure to be one; return the text that begins with it."""
        assert self._thought is not None
        assert self._calls is not None
        if self._calls.is_unsure:
            self._held = HeldThought(self._thought.ends)
        else:
            self._thought = self._thought.again()
        return self._calls.resume()

    def _decide(self, text: str, ended: bool) -> tuple[list[Parsed], str | None]:
        """Add to the held text; return what is shown of it, and the text to read next: None if nothing is decided."""
        held = self._held
        assert held is not None
        assert self._thought is not None
        assert self._calls is not None
        held.add(text)
        is_reasoning = held.is_reasoning(self._calls.begins_call, ended=ended)
        if is_reasoning is None:
            return [], None
        self._held = None
        if is_reasoning:
            self._thought = self._thought.again()
            return [], held.text
        if held.is_open:  # A call in it need not be well-formed.
            self._calls.expect_grammar("")
        shown, rest = held.as_text(self._thought.begins)
        return [self._calls.pass_over(shown)], rest
