"""TemplateTraits: what a chat template expects of messages and tools, found by rendering probes at load time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.router.text.adaptations import RULES, SYSTEM_FIRST, Adaptation, Messages, adapted
from kvferry.router.text.call_ids import IdForm, identified
from kvferry.router.text.function_variables import function_variables, takes_functions
from kvferry.router.text.message_shaping import calls_apart, in_parts, object_arguments, text_arguments
from kvferry.router.text.thinking_variables import EFFORT, EFFORTS

_PROBE = "kvferry-probe"
_NAME, _KEY, _VALUE, _RESULT = "kvferry_call", "kvferry_key", "kvferry_value", "kvferry-result"
_ID = "kvferryid"
"""Id of nine letters, which all known forms but Kimi's allow."""
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A value."}}, "required": [_KEY]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Probes.", "parameters": _SCHEMA}}
XML_TOOLS = "xml_tools"
"""Variable in which SmolLM3's templates look for tools."""
Render = Callable[[Sequence["Probe"]], Sequence[str | None]]
"""Renders probes; returns None for those that the template refuses."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One conversation to render: whether it comes with a tool, and the template's variables."""

    with_tools: bool
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What one template expects.

    wants_parts     content is a list of parts, not a string
    takes_xml_tools the tools are also given in the variable xml_tools
    takes_functions the functions are given as JSON text in the variable functions, and the date in datetime
    hides_tools     the template shows no tools although it reads their variable, which it sets itself
    wants_tools     without tools, `tools` is an empty list: the template refuses None
    takes_system    the template shows a system message
    text_arguments  a call's arguments are JSON text, not an object
    drops_calls     calls of earlier answers are not shown
    null_content    calls are shown only beside content that is None, so that other content gets its own message
    ids             form of the ids of calls
    names_results   the template shows the name of a result's function
    rules           adaptations that it needs, in their order
    efforts         values of reasoning_effort that it takes; empty: any
    """

    wants_parts: bool = False
    hides_tools: bool = False
    wants_tools: bool = False
    takes_xml_tools: bool = False
    takes_functions: bool = False
    takes_system: bool = False
    text_arguments: bool = False
    drops_calls: bool = False
    null_content: bool = False
    ids: IdForm = IdForm.ANY
    names_results: bool = False
    rules: tuple[Adaptation, ...] = ()
    efforts: frozenset[str] = frozenset()

    def content(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages with their content as the template expects it."""
        if self.null_content:
            messages = [part for each in messages for part in calls_apart(each)]
        if not self.wants_parts:
            return list(messages)
        return [each if each["content"] is None else in_parts(each) for each in messages]

    def tools(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        """Return the variables that hold the tools."""
        if self.takes_functions:
            return function_variables(tools or ())
        own = {XML_TOOLS: tools} if tools and self.takes_xml_tools else {}
        return {"tools": tools or ([] if self.wants_tools else None), **own}

    def calls(self, messages: Sequence[Mapping[str, Any]], *, keeps_functions: bool) -> list[dict[str, Any]]:
        """Return messages with calls and results as the template expects them. See `identified`."""
        shown = identified(messages, self.ids, names_results=self.names_results, keeps_functions=keeps_functions)
        return list(map(text_arguments if self.text_arguments else object_arguments, shown))


def probed(render: Render, variables: Collection[str], *, knows_calls: bool) -> TemplateTraits:
    """Return the traits of a template that reads these variables."""
    traits = _base(render, TemplateTraits(takes_functions=takes_functions(variables)))
    traits = replace(traits, takes_xml_tools=XML_TOOLS in variables)
    traits = replace(traits, hides_tools=_hides_tools(render, traits))
    if knows_calls:
        traits = _of_calls(render, traits)
    if EFFORT in variables:
        traits = replace(traits, efforts=_efforts(render, traits))
    return _with_rules(render, traits, knows_calls=knows_calls)


def _base(render: Render, traits: TemplateTraits) -> TemplateTraits:
    """Return the first form of content and tools with which the template shows a user's message."""
    forms = [
        replace(traits, wants_parts=parts, wants_tools=tools) for tools in (False, True) for parts in (False, True)
    ]
    user: Messages = [{"role": "user", "content": _PROBE}]
    shown = render([_probe(form, user) for form in forms])
    return next((form for form, text in zip(forms, shown, strict=True) if _shows(text, user)), forms[0])


def _hides_tools(render: Render, traits: TemplateTraits) -> bool:
    """Return whether the template shows conversations with a tool, but never the tool."""
    user: Messages = [{"role": "user", "content": _PROBE}]
    texts = render([_probe(traits, each, tools=True) for each in (user, SYSTEM_FIRST)])
    shown = [text for text in texts if text is not None]
    return bool(shown) and not any(_NAME in text for text in shown)


def _efforts(render: Render, traits: TemplateTraits) -> frozenset[str]:
    """Return the efforts that the template accepts; empty if it accepts all of them."""
    user = _probe(traits, [{"role": "user", "content": _PROBE}])
    texts = render([replace(user, variables={**user.variables, EFFORT: each}) for each in EFFORTS])
    taken = frozenset(each for each, text in zip(EFFORTS, texts, strict=True) if text is not None)
    return taken if len(taken) < len(EFFORTS) else frozenset()


def _of_calls(render: Render, traits: TemplateTraits) -> TemplateTraits:
    found, changed = _call_texts(render, traits), replace(traits, null_content=True)
    if not _takes_object(found["object"]) and not _takes_text(found["text"]):
        others = _call_texts(render, changed)
        if _takes_object(others["object"]) or _takes_text(others["text"]):
            traits, found = changed, others
    takes_text = not _takes_object(found["object"]) and _takes_text(found["text"])
    kind, suffix = ("text", ", text") if takes_text else ("object", "")
    plain, long, named = found[kind], found["long id" + suffix], found["named" + suffix]
    return replace(
        traits,
        text_arguments=takes_text,
        drops_calls=plain is not None and not any(_shows_call(found[each]) for each in ("object", "text")),
        ids=_id_form(plain, long),
        names_results=named is not None and named != plain,
    )


def _call_texts(render: Render, traits: TemplateTraits) -> dict[str, str | None]:
    """Return what the template writes for a call and its result, by case."""
    cases: dict[str, Messages] = {
        "object": _conversation(_ID),
        "text": list(map(text_arguments, _conversation(_ID))),
        "long id": _conversation(f"call_{_ID}_{_ID}"),
        "long id, text": list(map(text_arguments, _conversation(f"call_{_ID}_{_ID}"))),
        "named": _conversation(_ID, name=_NAME),
        "named, text": list(map(text_arguments, _conversation(_ID, name=_NAME))),
    }
    texts = render([_probe(traits, messages, tools=True) for messages in cases.values()])
    return {case: _tail(text) for case, text in zip(cases, texts, strict=True)}


def _id_form(plain: str | None, long: str | None) -> IdForm:
    if plain is not None and long is None:
        return IdForm.NINE
    call = (plain or "").partition(_RESULT)[0]
    if f"functions.{_NAME}:0" in call or (_ID in call and _NAME not in call):
        return IdForm.INDEXED
    return IdForm.ANY


def _shows_call(text: str | None) -> bool:
    return text is not None and (_NAME in text or _VALUE in text)


def _takes_object(text: str | None) -> bool:
    return text is not None and _VALUE in text and f"{{'{_KEY}'" not in text


def _takes_text(text: str | None) -> bool:
    return text is not None and _VALUE in text and f'\\"{_KEY}' not in text


def _with_rules(render: Render, traits: TemplateTraits, *, knows_calls: bool) -> TemplateTraits:
    """Add the rules that the template needs: it rejects a sample or drops a part of it, but shows the adapted one."""
    variants: dict[str, Messages] = {}
    for place, rule in enumerate(RULES):
        for sample in rule.samples:
            for changed in _variants(sample, place):
                variants[_key(changed)] = changed
    cases = {key: each for key, each in variants.items() if knows_calls or not _has_calls(each)}
    probes = [
        _probe(traits, traits.calls(each, keeps_functions=False), tools=_has_calls(each)) for each in cases.values()
    ]
    texts = dict(zip(cases, render(probes), strict=True))
    shown = {key for key, text in texts.items() if _shows(text, cases[key])}
    needed: list[Adaptation] = []
    for place, rule in enumerate(RULES):
        pairs = [(adapted(each, needed)[0], adapted(each, RULES[place:])[0]) for each in rule.samples]
        if any(_key(now) not in shown and _key(changed) in shown for now, changed in pairs):
            needed.append(rule)
    system = _key(SYSTEM_FIRST)
    return replace(traits, rules=tuple(needed), takes_system=system in shown)


def _variants(sample: Messages, place: int) -> list[Messages]:
    """Return a sample as changed by any rules before `place`, and as changed by all rules from `place` on."""
    found = [sample]
    for rule in RULES[:place]:
        found += [changed for each in found if (changed := rule.apply(each)) not in found]
    return [*found, adapted(sample, RULES[place:])[0]]


def _probe(traits: TemplateTraits, messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> Probe:
    return Probe(
        tools,
        {
            "messages": traits.content(messages),
            **traits.tools([_TOOL] if tools else None),
            "documents": None,
            "add_generation_prompt": True,
        },
    )


def _conversation(call_id: str, **result: str) -> Messages:
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    return [
        {"role": "user", "content": _PROBE},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": _RESULT, **result},
    ]


def _tail(text: str | None) -> str | None:
    """Return the text after the user's message, and therefore after the tools in most templates."""
    return None if text is None else text[text.rfind(_PROBE) :]


def _shows(text: str | None, messages: Messages) -> bool:
    return text is not None and "'type'" not in text and all(each["content"] in text for each in messages)


def _has_calls(messages: Messages) -> bool:
    return any(each.get("tool_calls") for each in messages)


def _key(messages: Messages) -> str:
    return json.dumps(messages)
