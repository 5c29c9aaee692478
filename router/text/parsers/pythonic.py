"""Parser for pythonic calls: `[get(a=1), put(b='x')]`, plain or in `<|python_start|>` and `<|python_end|>`.

A call is shown at its closing bracket, when its arguments can be converted to JSON."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from kvferry.router.text.parsers.call_parser import CallParser

BEGIN, END = "<|python_start|>", "<|python_end|>"
INSTRUCTION = re.compile(r"\[func_name1\(param")
"""Instruction of templates that ask for such calls (Llama 3.2 and 4, ToolACE) and write earlier ones without quotes."""
MAX_DEPTH = 50
"""Largest nesting depth of brackets in a call, since Python's parser is recursive."""
_HEAD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_-]{0,63})\(")
_BEGUN = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_-]{0,63})?")
_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser(CallParser):
    """Parser of pythonic tool calls."""

    opens = (BEGIN,)
    opens_first = ("[",)

    def _opened(self, marker: str) -> None:
        self._marker = marker
        self._form = "list" if marker == BEGIN else "call"
        self._begin_call()

    def _begin_call(self) -> None:
        self._end: CallEnd | None = None
        self._source = ""

    def _read_call(self) -> bool:
        if self._form == "list":
            return self._read_list()
        if self._form == "between":
            return self._read_between()
        if self._end is None:
            head = _HEAD.match(self._held)
            if head is None or head[1] not in self._names:
                wait = head is None and _BEGUN.fullmatch(self._held) and not self._ended
                return False if wait else self._refuse()
            self._name, self._source, self._held = head[1], head[0], self._held[head.end() :]
            self._end = CallEnd()
        at = self._end.feed(self._held)
        self._source, self._held = self._source + self._held[:at], self._held[at:]
        if not self._end.done:
            return self._refuse() if self._ended or self._end.broken else False
        arguments = arguments_of(self._source.strip(), self._name)
        if arguments is None:
            return self._refuse()
        self._call(self._new_call(), name=self._name, arguments=arguments)
        self._form, self._marker = "between", ""
        return True

    def _refuse(self) -> bool:
        self._emit_text(self._marker + self._source)
        self._end_call()
        return True

    def _read_list(self) -> bool:
        """Read the opening bracket after BEGIN."""
        rest = self._held.lstrip()
        if not rest and not self._ended:
            return False
        if not rest.startswith("["):
            return self._refuse()
        self._marker += self._held[: len(self._held) - len(rest) + 1]
        self._held, self._form = rest[1:], "call"
        return True

    def _read_between(self) -> bool:
        """Read a comma and another call, or the end of the list and an optional END."""
        rest = self._held.lstrip()
        if rest.startswith(","):
            self._marker = self._held[: len(self._held) - len(rest) + 1]
            self._held, self._form = rest[1:], "call"
            self._begin_call()
            return True
        tail = rest[1:].lstrip() if rest.startswith("]") else rest
        if END.startswith(tail) and tail != END and not self._ended:
            return False
        self._held = tail.removeprefix(END) if tail or not self._ended else tail
        self._end_call()
        return True


class CallEnd:
    """Finds the bracket that closes a call after its opening bracket, with Python's string syntax."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self._open = ["("]
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        """Return the position reached: the end of the text unless done or broken."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._open.append(char)
                self.broken = len(self._open) > MAX_DEPTH
            elif char in ")]}":
                self.broken = self._open.pop() + char not in ("()", "[]", "{}")
                self.done = not self._open and not self.broken
            if self.done or self.broken:
                return at + 1
        return len(text)


def arguments_of(source: str, name: str) -> str | None:
    """Return a call's arguments as JSON; None unless `source` is a call with keyword arguments of JSON values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("_" + source[len(name) :], mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        return json.dumps(
            {_key(each.arg): _value(each.value) for each in tree.keywords}, allow_nan=False, ensure_ascii=False
        )
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _key(name: Any) -> str:
    """Return a name; raise ValueError for `**` and for dictionary keys that are not text."""
    if not isinstance(name, str):
        raise ValueError("no name")
    return name


def _value(node: ast.expr | None) -> Any:
    """Return a literal's value; raise ValueError if JSON cannot represent it."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id="true" | "false" | "null"):
            return _WORDS[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            return {_key(_value(key)): _value(each) for key, each in zip(node.keys, node.values, strict=True)}
    raise ValueError("no JSON value")
