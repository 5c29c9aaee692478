"""ReasoningParser: separates reasoning at the beginning of an output, before the tool-call parsers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.text.parsers.call_parser import held_from
from kvferry.router.text.transcript import Parsed


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning marks of a model family, at the beginning of the output.

    begins, ends  marks; the model writes any one of them
    always        reasoning also begins without a mark
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    always: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Return whether the output begins within reasoning, as the end of its prompt shows."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begins) or (self.always and not prompt.endswith(self.ends))


class ReasoningParser:
    """Parser of reasoning; drops blanks around the marks."""

    def __init__(self, thinking: Thinking, *, opened: bool) -> None:
        self._thinking = thinking
        self._state = "inside" if opened else "before"
        self._held = ""
        self._has_shown = False
        """True once some reasoning was shown."""

    def again(self) -> ReasoningParser:
        """Return a new parser with the same marks."""
        return ReasoningParser(self._thinking, opened=False)

    @property
    def begins(self) -> tuple[str, ...]:
        """Return the marks that begin reasoning."""
        return self._thinking.begins

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the marks that end reasoning."""
        return self._thinking.ends

    @property
    def inside(self) -> bool:
        """Return whether reasoning has begun and not ended."""
        return self._state == "inside"

    @property
    def open(self) -> bool:
        """Return whether the next text is or may be reasoning."""
        return self._state in ("before", "inside")

    def feed(self, text: str) -> Parsed:
        """Parse more text and return the reasoning and text found."""
        if self._state == "after":
            return Parsed(text)
        self._held += text
        reasoning = ""
        if self._state == "before":
            self._find_beginning()
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "gap" and self._held.lstrip():
            self._held, self._state = self._held.lstrip(), "after"
        return Parsed(self._rest() if self._state == "after" else "", reasoning)

    def finish(self) -> Parsed:
        """End the text; text held back within reasoning is reasoning."""
        inside, gap = self._state == "inside", self._state == "gap"
        self._state = "after"
        held = self._rest()
        return Parsed(reasoning=held.rstrip()) if inside else Parsed("" if gap else held)

    def _find_beginning(self) -> None:
        rest = self._held.lstrip()
        for mark in self._thinking.begins:
            if rest.startswith(mark):
                self._held, self._state = rest[len(mark) :], "inside"
                return
        if not any(mark.startswith(rest) for mark in self._thinking.begins):
            self._state = "after"

    def _inside(self) -> str:
        """Return the reasoning that can be shown, without a repeated mark at its beginning."""
        if not self._has_shown:
            self._held = self._held.lstrip()
            for mark in self._thinking.begins:
                while self._held.startswith(mark):
                    self._held = self._held[len(mark) :].lstrip()
            if self._held and any(mark.startswith(self._held) for mark in self._thinking.begins):
                return ""
        found = [(at, mark) for mark in self._thinking.ends if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            shown, self._held, self._state = self._held[:at].rstrip(), self._held[at + len(mark) :], "gap"
        else:
            cut = len(self._held[: held_from(self._held, self._thinking.ends)].rstrip())
            shown, self._held = self._held[:cut], self._held[cut:]
        self._has_shown = self._has_shown or bool(shown)
        return shown

    def _rest(self) -> str:
        held, self._held = self._held, ""
        return held
