"""Parser for Mistral calls: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re

from kvferry.router.text.parsers.hermes import ObjectParser
from kvferry.router.text.parsers.json_call import ValueEnd, is_object

BEGIN, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)")
_BEGUN = re.compile(r"\s*[a-zA-Z0-9_-]{0,64}\s*(?:\[[A-Z_]{0,8}\]?\w{0,64}){0,2}\s*")
"""Text that may still become a head."""


class MistralParser(ObjectParser):
    """Parser of Mistral tool calls."""

    opens = (BEGIN,)
    id_len = 9
    """Length of call ids; the models' templates reject other ids."""

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        self._object = None
        self._form = "head"

    def _read_call(self) -> bool:
        if self._form == "head":
            return self._read_head()
        if self._form == "arguments":
            return self._read_arguments()
        return self._read_object() if self._object is not None else self._read_between()

    def _read_head(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith("["):
            self._form = "list"
            between = self._held[: len(self._held) - len(rest) + 1]
            self._held = rest[1:]
            self._begin_object(between)
            return True
        head = _HEAD.match(self._held)
        if head is not None and head[1] in self._names:
            self._held = self._held[head.end() :]
            self._marker += head[0]
            self._form, self._name, self._value, self._end = "arguments", head[1], "", ValueEnd()
            return True
        if head is None and _BEGUN.fullmatch(self._held) and not self._ended:
            return False
        self._emit_text(self._marker)
        self._end_call()
        return True

    def _read_arguments(self) -> bool:
        end = self._end.feed(self._held, 0)
        fresh, self._held = self._held[:end], self._held[end:]
        self._value += fresh
        ended = self._end.done or self._ended
        if self._patient:
            fresh = self._value if ended else ""
        if self._patient and (not is_object(self._value) if self._end.done else self._whole):
            self._emit_text(self._marker + self._value)
        elif fresh:
            if self._index < 0:
                self._index = self._new_call()
                self._call(self._index, name=self._name)
            self._call(self._index, arguments=fresh)
        if ended:
            self._end_call()
        return ended

    def _read_between(self) -> bool:
        """Read a comma and another call, or the end of the list."""
        rest = self._held.lstrip()
        if rest.startswith(","):
            between = self._held[: len(self._held) - len(rest) + 1]
            self._held = rest[1:]
            self._begin_object(between)
            return True
        if not rest and not self._ended:
            return False
        self._held = rest.removeprefix("]") if rest else self._held
        self._end_call()
        return True
