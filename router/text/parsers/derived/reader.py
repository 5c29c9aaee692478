"""SyntaxParser: incremental parser of tool calls in a derived syntax."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.derived.argument_readers import ArgumentReader, reader_of
from kvferry.router.text.parsers.derived.differences import first_unit
from kvferry.router.text.parsers.derived.matching import match
from kvferry.router.text.parsers.derived.syntax import ToolSyntax, is_mark


class SyntaxParser(CallParser):
    """Parser of calls as a ToolSyntax describes them.

    `names` may map each tool's name to the JSON schema of its parameters, which gives the types of unquoted values."""

    def __init__(
        self,
        syntax: ToolSyntax,
        names: Collection[str],
        *,
        patient: bool = False,
        thoughts: tuple[str, ...] = (),
    ) -> None:
        self._syntax, self._frame = syntax, syntax.frame
        self._tools: Mapping[str, Any] = names if isinstance(names, Mapping) else dict.fromkeys(names)
        if self._frame.reply:
            self._tools = {self._frame.reply: {}, **self._tools}
        super().__init__(self._tools, patient=patient, thoughts=thoughts)
        self._beginnings = _beginnings(syntax)
        self._closers = tuple(filter(None, (self._frame.end, self._frame.last)))
        self.opens = (*self._closers, *(marker for marker in self._beginnings if is_mark(marker)))
        self.opens_first = tuple(marker for marker in self._beginnings if not is_mark(marker))
        self.id_len = syntax.id_length
        self._brace = "{" if syntax.envelope is not None else ""
        self._further = None if syntax.between is None else syntax.between + syntax.head + self._brace
        self._held, self._begun = self._frame.begun, len(self._frame.begun)

    def _opened(self, marker: str) -> None:
        if marker in self._closers:
            self._lead = ""
            self._end_call()
            return
        self._raw, self._state = "", "head"
        self._beginning, self._held = self._beginnings[marker], marker + self._held

    def _read_call(self) -> bool:
        if self._state == "head":
            return self._read_head()
        if self._state == "arguments":
            return self._read_arguments()
        return self._read_close() if self._state == "close" else self._read_next()

    def _read_head(self) -> bool:
        found = match(self._beginning, self._held, names=self._names)
        begin = self._frame.begin
        if begin and self._held.startswith(begin):
            self._held, self._lead, self._begun = self._held[len(begin) :], "", 0
            self._end_call()
        elif found.found:
            self._begin(found.end, found.name)
        elif (found.waits or begin.startswith(self._held)) and not self._ended:
            return False
        else:
            self._refuse(max(1, len(first_unit(self._beginning))))
        return True

    def _begin(self, end: int, name: str) -> None:
        """Begin the arguments after a call's head; an envelope's brace is read again."""
        end -= len(self._brace)
        self._raw, self._held = self._raw + self._held[self._begun : end], self._held[end:]
        self._begun = 0
        self._arguments: ArgumentReader = reader_of(self._syntax, self._tools, name)
        self._state, self._index = "arguments", -1

    def _refuse(self, length: int = 0) -> None:
        """Show what was read as text, with `length` more characters; the rest may hold another call."""
        if self._begun:
            self._held, self._begun, length = self._held[self._begun :], 0, 0
        self._emit_text(self._raw + self._held[:length])
        self._held = self._held[length:]
        self._end_call()

    def _read_arguments(self) -> bool:
        call = self._arguments
        end = call.feed(self._held, ended=self._ended)
        self._held = self._held[end:]
        broken = call.broken or self._is_malformed(call)
        fresh = "" if self._patient and not (call.done or self._ended) else call.take()
        if call.name and fresh and call.name != self._frame.reply and not (broken and self._index < 0):
            if self._index < 0:
                self._index = self._new_call()
                self._call(self._index, name=call.name)
            self._call(self._index, arguments=fresh)
        if broken or (self._ended and not call.done):
            if self._index < 0:
                self._raw += "".join(call.raw)
                self._refuse()
            else:
                self._end_call()
        elif call.done:
            self._state = "close"
        else:
            return False
        return True

    def _read_close(self) -> bool:
        found = match(self._syntax.close.rstrip(), self._held)
        if found.found:
            self._held, self._state = self._held[found.end :], "next"
        elif found.waits and not self._ended:
            return False
        else:
            if found.waits:
                self._held = ""
            self._end_call()
        return True

    def _read_next(self) -> bool:
        """Read the beginning of another call, or what follows the last one."""
        start = len(self._held) - len(self._held.lstrip())
        following = None if self._further is None else self._further.lstrip()
        further = None if following is None else match(following, self._held, start, self._names)
        closing = match(self._syntax.closing.strip(), self._held, start) if self._syntax.closing.strip() else None
        if further is not None and further.found:
            self._raw = ""
            self._begin(further.end, further.name)
            return True
        if closing is not None and closing.found:
            self._held = self._held[closing.end :]
        elif not self._ended and ((further is not None and further.waits) or (closing is not None and closing.waits)):
            return False
        elif closing is not None and closing.waits:
            self._held = ""
        elif (rest := self._held.lstrip()).startswith(mark := first_unit(self._syntax.closing.lstrip())):
            self._held = rest[len(mark) :] if mark else self._held
        self._end_call()
        return True


def _beginnings(syntax: ToolSyntax) -> dict[str, str]:
    """Return the texts that begin calls, by their markers: with what precedes all calls, and marked ones without."""
    found: dict[str, str] = {}
    head = syntax.head + "{" * (syntax.envelope is not None)
    for beginning in (syntax.opening + head, head):
        marker = first_unit(beginning)
        if marker and (not found or is_mark(marker)):
            found.setdefault(marker, beginning)
    return found
