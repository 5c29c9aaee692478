"""Checks that a parser reads the calls a template wrote back as those calls, whole or one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.derived.probes import CALLS, NAMES, PARAMETERS, ProbeAnswer
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import ToolSyntax
from kvferry.router.text.parsers.output_parser import merged

Maker = Callable[[Collection[str]], CallParser]
"""Builds a parser for calls of these tools."""
REQUIRED = ("one", "two", "count", "rough", "tidy", "said", "several", "several_rough")
"""Probes that must be read back; all other probes show what the template cannot express."""


def is_proved(syntax: ToolSyntax, texts: Mapping[str, str]) -> bool:
    """Return whether the syntax reads back what the template wrote, by probe."""
    return is_read(partial(SyntaxParser, syntax), texts, syntax)


def is_read(make: Maker, texts: Mapping[str, str], syntax: ToolSyntax | None) -> bool:
    """Return whether parsers read back a template's calls, except those that `syntax` cannot express."""
    several = syntax is None or syntax.between is not None
    marked = syntax is None or syntax.is_marked
    required = [
        name for name in REQUIRED if NAMES[0] in texts.get(name, "") and (several or len(CALLS[name].calls) < 2)
    ]
    required = [name for name in required if marked or not CALLS[name].content]
    return bool(required) and all(reads_back(make, CALLS[name], texts[name]) for name in required)


def reads_back(make: Maker, probe: ProbeAnswer, text: str) -> bool:
    """Return whether the text of an answer is read as its calls, at once and in single characters."""
    expected = [(NAMES[place % len(NAMES)], _canonical(arguments)) for place, arguments in enumerate(probe.calls)]
    return all(calls_in(make(_TOOLS), pieces) == expected for pieces in ([text], list(text)))


_TOOLS = dict.fromkeys(NAMES, PARAMETERS)


def calls_in(parser: CallParser, pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and arguments of the calls in a text, in one spelling."""
    found = [*map(parser.feed, pieces), parser.finish()]
    calls = merged([delta for each in found for delta in each.calls])
    return [(call.name, _canonical(_decoded(call.arguments))) for call in calls]


def _canonical(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True)


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None
