"""Rendering: one prompt for a chat template (variables and options), and the errors its rendering can end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.harmony_history import with_instructions
from kvferry.router.text.render_frames import (
    DEADLINE_S,
    ERROR,
    MEMORY,
    MEMORY_SPENT,
    TEXT,
    TOO_LONG,
    longest_text,
    pack,
)

WITHIN_LIMITS = f"within {MEMORY >> 20} MiB of memory and {DEADLINE_S:.0f} s"


@dataclass(frozen=True, slots=True)
class Rendering:
    """One rendering of a model's template; raises InvalidRequest for variables that are not JSON.

    name       plain or tool_use
    variables  variables of the template
    mark       begins instructions in mid-conversation; empty: none have a mark
    continued  content of the last message, with which the prompt ends; None: it is not continued
    param      field of the messages, for errors
    adaptations  names of the rules that changed the messages, so that the template accepts them
    frame      name and variables for a child process
    """

    name: str
    variables: Mapping[str, Any]
    mark: str = ""
    continued: str | None = None
    param: str = "messages"
    adaptations: tuple[str, ...] = ()
    frame: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "frame", pack([self.name, self.variables]))
        except ValueError as error:
            raise self.refused(str(error)) from error

    def outcome(self, kind: bytes, text: str) -> str:
        """Return the prompt of a child's answer; raise InvalidRequest."""
        if kind == TEXT:
            return self.finished(text)
        if kind == ERROR:
            raise self.refused(text)
        if kind == MEMORY_SPENT:
            raise self._exceeded(f"takes more than {MEMORY >> 20} MiB of memory")
        if kind == TOO_LONG:
            raise self._exceeded(f"writes more than {longest_text(len(self.frame))} bytes")
        raise self.died()

    def finished(self, text: str) -> str:
        """Return the prompt from what the template wrote; raise InvalidRequest if it cannot be continued."""
        text = with_instructions(text, self.mark) if self.mark else text
        if self.continued is None:
            return text
        content = self.continued.strip()
        at = text.rfind(content)
        if not content or at < 0:
            raise InvalidRequest("the last message has no content to continue", param="continue_final_message")
        return text[: at + len(content)]

    def refused(self, why: str) -> InvalidRequest:
        """Return the error of a template that raises one."""
        return InvalidRequest(f"the chat template refused the {self.param}: {why}", param=self.param)

    def late(self, deadline_s: float) -> InvalidRequest:
        """Return the error of a rendering that is too slow."""
        return self._exceeded(f"takes more than {deadline_s:g} s")

    def died(self) -> InvalidRequest:
        """Return the error of a rendering whose process ends each time."""
        return self._exceeded(f"cannot be rendered {WITHIN_LIMITS}")

    def _exceeded(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the chat template {what} for these {self.param}, which is the limit", param=self.param)
