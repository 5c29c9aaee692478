"""derive: renders the probes, derives a template's syntax of calls and reasoning, and checks that it reads back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.router.text.parsers.derived.derivation import derived_syntax
from kvferry.router.text.parsers.derived.differences import last_unit, shared_start
from kvferry.router.text.parsers.derived.probes import (
    CALLS,
    IDS,
    NAMED_IDS,
    NAMES,
    OPENAI_ID,
    REASONING,
    REASONING_KEYS,
    TOOLS,
    USER,
)
from kvferry.router.text.parsers.derived.syntax import ToolSyntax, is_mark
from kvferry.router.text.parsers.derived.thoughts import derived_thinking
from kvferry.router.text.parsers.derived.verification import is_proved
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template_traits import TemplateTraits

Write = Callable[[list[Rendering]], list[str | None]]
"""Renders prompts; returns None for those that the template refuses."""
MAX_TURN = 16 * 1024
"""Longest answer that is compared, in characters; those of the probes have less than 1,000."""
_OBJECTS, _TEXTS, _NAMED_IDS, _OPENAI = "objects", "texts", "named ids", "openai"
_THINKS: Mapping[str, Any] = {"enable_thinking": True, "thinking": True}
"""Variables by which templates are asked for reasoning."""
_REASONING_KINDS = tuple(f"{key}{way}" for key in REASONING_KEYS for way in ("", " thinks"))


@dataclass(frozen=True, slots=True)
class Derived:
    """Syntax of tool calls and reasoning marks that a template reveals; each is None unless it was verified.

    shows_calls: the template writes calls, whether or not they can be read
    texts: its calls, by probe, as a model would write them"""

    calls: ToolSyntax | None = None
    thinking: Thinking | None = None
    shows_calls: bool = False
    texts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """Properties of a template from which its syntax is derived."""

    write: Write
    special_tokens: Mapping[str, str]
    traits: TemplateTraits
    knows_calls: bool


_Case = tuple[str, str, Rendering]
"""Kind of the arguments or field of the reasoning, name of the probe, and the prompt."""


def derive(template: Template) -> Derived:
    """Derive and verify the template's syntax of calls and reasoning."""
    user = {"role": "user", "content": USER}
    opening = _prompt(template, [user], opens=True)
    thinking = _prompt(template, [user], opens=True, variables=_THINKS)
    cases = (
        [*_call_cases(template), *_reasoning_cases(template)] if template.knows_calls else [*_reasoning_cases(template)]
    )
    texts = template.write([opening, thinking, *(rendering for *_, rendering in cases)])
    prompt, turns = _turn(texts[0] or ""), dict[str, dict[str, str]]()
    for (kind, name, _), text in zip(cases, texts[2:], strict=True):
        if text is not None and USER in text and len(turn := _turn(text)) <= MAX_TURN:
            turns.setdefault(kind, {})[name] = turn
    derived = Derived()
    for kind in (_OBJECTS, _TEXTS, _NAMED_IDS):
        if "one" in turns.get(kind, {}) and derived.calls is None:
            derived = _with_calls(derived, template, kind, turns[kind], prompt)
    for kind, opened in zip(_REASONING_KINDS, (prompt, _turn(texts[1] or prompt)) * len(REASONING_KEYS), strict=True):
        marks = derived_thinking(turns.get(kind, {}), opened, derived.calls)
        if marks is not None:
            return replace(derived, thinking=marks)
    return derived


def _with_calls(derived: Derived, template: Template, kind: str, turns: dict[str, str], prompt: str) -> Derived:
    accepts_any = turns.pop(_OPENAI, None) is not None or kind == _NAMED_IDS
    begun = _begun(prompt, [turns[name] for name in ("one", "said") if name in turns])
    texts = tuple((name, turn[begun:]) for name, turn in turns.items() if CALLS[name].calls)
    shows = turns["one"].count(NAMES[0]) > turns.get("plain", "").count(NAMES[0])
    syntax = derived_syntax(turns, begun, [template.special_tokens.get("eos_token", "")])
    if syntax is not None and not accepts_any:
        syntax = replace(syntax, id_length=len(IDS[0]))
    if syntax is None or not is_proved(syntax, dict(texts)):
        return derived if derived.shows_calls else Derived(shows_calls=shows, texts=texts if shows else ())
    return Derived(syntax, shows_calls=True, texts=texts)


def _begun(prompt: str, turns: Sequence[str]) -> int:
    """Return the length of the part of each turn that the prompt already has, with the mark that ends the prompt."""
    begun, mark = shared_start(prompt, *turns), last_unit(prompt.rstrip())
    return begun + len(mark) * (is_mark(mark) and all(turn.startswith(mark, begun) for turn in turns))


def _call_cases(template: Template) -> Iterator[_Case]:
    for kind, ids in ((_OBJECTS, IDS), (_TEXTS, IDS), (_NAMED_IDS, NAMED_IDS)):
        as_text = kind == _TEXTS
        for name, probe in CALLS.items():
            yield kind, name, _prompt(template, probe.messages(as_text=as_text, ids=ids))
        yield kind, _OPENAI, _prompt(template, CALLS["one"].messages(as_text=as_text, ids=(OPENAI_ID,)))


def _reasoning_cases(template: Template) -> Iterator[_Case]:
    for kind in _REASONING_KINDS:
        key, _, thinks = kind.partition(" ")
        for name, probe in REASONING.items():
            variables = _THINKS if thinks else {}
            yield kind, name, _prompt(template, probe.messages(key=key), variables=variables)


def _prompt(
    template: Template, messages: Sequence[Any], *, opens: bool = False, variables: Mapping[str, Any] | None = None
) -> Rendering:
    return Rendering(
        "tool_use" if template.knows_calls else "plain",
        {
            **template.special_tokens,
            **(variables or {}),
            "messages": template.traits.content(messages),
            **template.traits.tools(TOOLS if template.knows_calls else None),
            "documents": None,
            "add_generation_prompt": opens,
        },
    )


def _turn(text: str) -> str:
    """Return what follows the user's message."""
    return text.rpartition(USER)[2]
