"""Parsers for `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), and a base for JSON calls."""

from __future__ import annotations

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.json_call import CallObject

BEGIN, END = "<tool_call>", "</tool_call>"
REPLY, REPLIED = "<text>", "</text>"
"""Tags around an answer without calls, if the prompt asks for them (see `tool_prompt`)."""


class ObjectParser(CallParser):
    """Base of parsers for calls written as one JSON object after `_marker`."""

    def _opened(self, marker: str) -> None:
        self._marker = marker
        self._begin_object()

    def _begin_object(self, between: str = "") -> None:
        """Begin an object; `between` precedes it and is text if no call follows."""
        self._object: CallObject | None = CallObject(self._names)
        self._marker += between
        self._index = -1

    def _read_object(self) -> bool:
        """Read more of the object.

        Afterwards `_object` is None if it ended, and `_end_call` was called if it was malformed. Returns whether
        anything was read."""
        call = self._object
        assert call is not None
        end = call.feed(self._held)
        self._held = self._held[end:]
        broken = call.broken or self._is_malformed(call)
        if call.name and not (broken and self._index < 0) and (not self._patient or call.done or self._ended):
            if self._index < 0:
                self._index = self._new_call()
                self._call(self._index, name=call.name)
            self._call(self._index, arguments=call.take())
        if broken or (self._ended and not call.done):
            if self._index < 0:
                self._emit_text(self._marker + "".join(call.raw))
            self._end_call()
        elif call.done:
            self._object, self._marker = None, ""
        else:
            return False
        return True


class HermesParser(ObjectParser):
    """Parser of Hermes and Qwen tool calls."""

    opens: tuple[str, ...] = (BEGIN,)

    def _read_call(self) -> bool:
        if self._object is not None:
            return self._read_object()
        rest = self._held.lstrip()
        if rest.startswith(END):
            self._held = rest[len(END) :]
        elif END.startswith(rest):
            if not self._ended:
                return False
            self._held = ""
        self._end_call()
        return True


class LedHermesParser(HermesParser):
    """Parser for models without tool support, prompted by `tool_prompt`.

    A text answer begins with REPLY and may end with REPLIED; neither is shown."""

    opens = (BEGIN, REPLIED)
    _closers = (REPLIED,)
    opens_first = (REPLY,)

    def _opened(self, marker: str) -> None:
        if marker == BEGIN:
            super()._opened(marker)
        else:  # The grammar does not bound the reply.
            self._lead = self._grammar_marker = ""
            self._end_call()
