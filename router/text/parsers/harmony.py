"""HarmonyParser: parser for gpt-oss outputs in OpenAI's harmony format.

  <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
  <|constrain|>json<|message|>{...}<|call|>

Text on the analysis channel is reasoning, a message to one of the tools is a call, and everything else is text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.text.detokenizer import detokenizer
from kvferry.router.text.parsers.call_parser import new_id
from kvferry.router.text.parsers.json_call import ValueEnd, is_object
from kvferry.router.text.transcript import CallDelta, Parsed

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
MARKS = {marker: chr(0xD800 + place) for place, marker in enumerate(MARKERS)}
"""Character that the parser sees for each marker's token: a lone surrogate, which no text contains.

The same letters written as ordinary text stay text."""
START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = MARKS.values()
ANALYSIS, COMMENTARY, FINAL = CHANNELS = ("analysis", "commentary", "final")
FUNCTIONS = "functions."
ROLE = "assistant"
_ROLES = (ROLE, "user", "system", "developer", "tool")
MAX_HEAD_CHARS = 160
"""Longest head of a message, in characters; a longer one is text."""

_MARK = re.compile(f"([{START}-{RETURN}])")
_TO = rf"to=[^\s{START}-{RETURN}]*"
_HEAD = re.compile(
    rf"(?P<start>{START}(?P<role>{'|'.join(_ROLES)})?)?\s*(?P<to>{_TO})?\s*"
    rf"(?P<channel>{CHANNEL}\s*(?P<name>{'|'.join(CHANNELS)}|\w*)\s*(?P<then>{_TO})?)?\s*"
    rf"({CONSTRAIN}\s*\w*|(?P<plain>json|code))?\s*"
)
_WORDS = ("to=", "json", "code")


def marks(tokenizer: TextTokenizer) -> dict[int, str]:
    """Return the marks by the ids of their tokens."""
    ids = {tokenizer.library.token_to_id(marker): mark for marker, mark in MARKS.items()}
    return {token_id: mark for token_id, mark in ids.items() if token_id is not None}


def lead(tokenizer: TextTokenizer, prompt: Sequence[int]) -> str:
    """Return the message that the prompt has begun, including its marks."""
    shown = marks(tokenizer)
    start = next((place for place in range(len(prompt) - 1, -1, -1) if shown.get(prompt[place]) == START), len(prompt))
    return "".join(map(detokenizer(tokenizer, shown=shown).feed, prompt[start:]))


class HarmonyParser:
    """Parser of messages on channels. Implements `router.text.parsers.turn_parser.Reader`.

    names    tools that may be called; a message to another recipient is text
    patient  a call is shown once complete, and as text if malformed
    thinks   reasoning is separated from text
    lead     beginning of the output's first message in the prompt

    An invalid head (no message follows, or it has other words) is text, as is the message it would have headed.
    Messages of one kind are separated by a newline."""

    may_think = True
    holds_thought = is_undecided = False

    def __init__(self, names: Collection[str], *, patient: bool = False, thinks: bool = True, lead: str = "") -> None:
        self._names = frozenset(names)
        self._patient, self._splits = patient, thinks
        self._head: str | None = ""
        """Head read so far; None within a message."""
        self._kind = "text"
        """Kind of the message: text, reasoning or call."""
        self._between = ""
        """Text to insert before the next text of the message."""
        self._first = True
        """True until the first marker: the beginning of a head may then be the whole text."""
        self._shown_kinds: set[str] = set()
        self._calls = 0
        self._found: list[Parsed] = []
        self.feed(lead)
        self._first = True

    @property
    def thinks(self) -> bool:
        return self._head is None and self._kind == "reasoning"

    def expect_grammar(self, marker: str) -> None:
        """Do nothing: calls have no marker of their own here."""

    def feed(self, text: str) -> list[Parsed]:
        for part in _MARK.split(text):
            if _MARK.fullmatch(part):
                self._mark(part)
                self._first = False
            elif self._head is None:
                self._emit_text(part)
            else:
                self._read_head(part)
        found, self._found = self._found, []
        return found

    def finish(self, *, is_whole: bool = False) -> list[Parsed]:
        self._end()
        return self.feed("")

    def _mark(self, mark: str) -> None:
        head = self._head
        if head is None and mark in (MESSAGE, CONSTRAIN):
            return
        if head is not None and mark == MESSAGE:
            self._open(head)
        elif head is not None and (mark == CONSTRAIN or (mark == CHANNEL and CHANNEL not in head)):
            self._head = head + mark
        else:
            self._end()
            self._head = mark if mark in (START, CHANNEL) else ""

    def _read_head(self, text: str) -> None:
        for place, char in enumerate(text):
            assert self._head is not None
            self._head += char
            found = _head(self._head)
            rest = self._head[found.end() :]
            words = _WORDS if found["role"] or not found["start"] else (*_WORDS, *_ROLES)
            if len(self._head) > MAX_HEAD_CHARS or not any(word.startswith(rest) for word in words):
                self._spill()
                self._emit_text(text[place + 1 :])
                return

    def _end(self) -> None:
        """End a message, or a head without a message, which may be truncated."""
        if self._head is None:
            self._close()
        elif _is_text(self._head, first=self._first):
            self._spill()
            self._close()
        self._head = ""

    def _spill(self) -> None:
        """Show an invalid head as text, without the part that was a valid head."""
        head, self._head = self._head or "", None
        self._open(head if CHANNEL in head else "")
        self._emit_text(_MARK.sub("", head[_head_end(head) :]))

    def _open(self, head: str) -> None:
        found = _head(head)
        to = (found["then"] or found["to"] or "to=").removeprefix("to=").removeprefix(FUNCTIONS)
        self._head = None
        self._name, self._value, self._value_end = "", "", ValueEnd()
        if to in self._names:
            self._kind, self._name = "call", to
            if not self._patient:
                self._call(name=to)
            return
        self._kind = "reasoning" if found["name"] == ANALYSIS and self._splits else "text"
        self._between = "\n" if self._kind in self._shown_kinds else ""

    def _emit_text(self, text: str) -> None:
        if self._kind == "call":
            self._add_arguments(text)
        elif text:
            self._shown_kinds.add(self._kind)
            shown, self._between = self._between + text, ""
            self._found.append(Parsed(shown) if self._kind == "text" else Parsed(reasoning=shown))

    def _add_arguments(self, text: str) -> None:
        """Add to a call's arguments; text after their end is ordinary text."""
        text = text if self._value else text.lstrip()
        end = self._value_end.feed(text, 0)
        self._value += text[:end]
        if not self._patient and text[:end]:
            self._call(arguments=text[:end])
        if self._value_end.done and text[end:].strip():
            self._close()
            self._kind, self._between = "text", "\n" if "text" in self._shown_kinds else ""
            self._emit_text(text[end:].lstrip())

    def _close(self) -> None:
        if self._kind != "call":
            return
        self._kind, value = "text", self._value
        if not self._patient:
            if not value.strip():
                self._call(arguments="{}")
            self._calls += 1
        elif not value.strip() or is_object(value) or (not self._value_end.done and value.lstrip().startswith("{")):
            self._call(name=self._name, arguments=value if value.strip() else "{}")
            self._calls += 1
        else:
            self._between = "\n" if "text" in self._shown_kinds else ""
            self._emit_text(value)

    def _call(self, *, name: str = "", arguments: str = "") -> None:
        self._found.append(Parsed(calls=(CallDelta(self._calls, new_id() if name else "", name, arguments),)))


def _head(text: str) -> re.Match[str]:
    found = _HEAD.match(text)
    assert found is not None
    return found


def _head_end(head: str) -> int:
    """Return where the text begins in an invalid head."""
    found = _head(head)
    if not found["start"] and not found["channel"]:
        return 0
    if found["name"] and found["name"] not in CHANNELS:
        return found.start("name")
    end = found.end("start") if not found["channel"] else found.start("plain") if found["plain"] else found.end()
    return len(head[:end].rstrip())


def _is_text(head: str, *, first: bool) -> bool:
    """Return whether a head without a message contains more than a possibly truncated head."""
    found, rest = _head(head), head[_head_end(head) :].strip()
    if found["channel"] or (found["role"] and not first):
        return bool(rest) and not found["to"] and not any(word.startswith(rest) for word in (*CHANNELS, *_WORDS))
    if found["start"] and not found["role"]:
        return not any(role.startswith(rest) for role in _ROLES)
    return bool(rest) and not (found["to"] and found.end() == len(head))
