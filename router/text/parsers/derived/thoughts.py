"""Derives a model's reasoning marks from what its template writes for answers with reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvferry.router.text.parsers.derived.differences import first_unit, last_unit, shared_start
from kvferry.router.text.parsers.derived.probes import CONTENT, REASON
from kvferry.router.text.parsers.derived.syntax import NAME, ToolSyntax, is_mark
from kvferry.router.text.parsers.reasoning import ReasoningParser, Thinking

_NAMED = re.compile(r"<[^<>\s]+>\w+<[^<>\s]+>$")
"""A mark that needs the word and the mark before it, because it ends other heads, too (Kimi K3)."""
MIN_WORDS = 12
"""Shortest mark without brackets, in characters: shorter words also occur in answers."""


def derived_thinking(turns: Mapping[str, str], prompt: str, calls: ToolSyntax | None) -> Thinking | None:
    """Return the marks around reasoning; None if the template writes none.

    turns: its texts for probes.REASONING. prompt: its text before an answer."""
    opener = "" if calls is None else first_unit((calls.opening + calls.head).partition(NAME)[0].strip())
    ends = {name: _end(turns.get(name, ""), follows) for name, follows in (("thought", CONTENT), ("called", opener))}
    known = [end for end in ends.values() if end]
    end = known[0][: shared_start(*known)].strip() if known else ""
    for name in ends:
        before, found, after = turns.get(name, "").partition(REASON)
        begin = _begin(before, end, prompt, turns.get("said", "")) if found else ""
        if _is_sure(begin) and _is_sure(end) and _reads_back(Thinking((begin,), (end,)), after):
            return Thinking((begin,), (end,))
    return None


def _end(turn: str, follows: str) -> str:
    """Return the text between reasoning and `follows`."""
    _, found, after = turn.partition(REASON)
    end, separator, _ = after.partition(follows) if found and follows else ("", "", "")
    return end.strip() if separator else ""


def _begin(before: str, end: str, prompt: str, answer: str) -> str:
    """Return the mark before reasoning, which the prompt may hold already."""
    own = before[shared_start(before, answer) :].strip()
    if before.startswith(prompt) and (rest := before[len(prompt) :].strip()):
        return own if own[:1] in ("<", "[") and rest.endswith(own) else rest
    if prompt.startswith(before) and (rest := prompt[len(before) :].strip()) and end not in rest:
        return rest
    if own:
        return own
    mark = last_unit(before := before.rstrip())
    named = _NAMED.search(before) if before.count(mark) > 1 else None
    return mark if named is None else named[0]


def _is_sure(mark: str) -> bool:
    return is_mark(mark) or len(mark) >= MIN_WORDS


def _reads_back(thinking: Thinking, after: str) -> bool:
    parser = ReasoningParser(thinking, opened=False)
    found = [*map(parser.feed, f"{thinking.begins[0]}\n{REASON}{after}"), parser.finish()]
    return "".join(each.reasoning for each in found) == REASON
