"""Derives a ToolSyntax (marks around calls and arguments) by comparing what a template wrote for the probes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.text.parsers.derived.argument_form import Written, derived_arguments
from kvferry.router.text.parsers.derived.differences import shared_end, shared_start
from kvferry.router.text.parsers.derived.probes import CALLS, CONTENT, IDS, NAMES, REASON, ProbeAnswer
from kvferry.router.text.parsers.derived.syntax import ID, INDEX, KEY, NAME, SAID, Arguments, Envelope, ToolSyntax

Turns = Mapping[str, str]
"""Text that a template writes after the user's message, for each probe that it accepts."""


@dataclass(frozen=True, slots=True)
class Core:
    """Part of a turn that holds a call's arguments, or its envelope."""

    start: int
    end: int


def derived_syntax(turns: Turns, begun: int, ends: Sequence[str]) -> ToolSyntax | None:
    """Return the syntax in which the template writes calls; None if no calls can be recognised.

    begun: length of the part of each turn that is in the prompt. ends: tokens that end a turn, such as eos_token."""
    if "one" not in turns:
        return None
    envelope = _envelope(turns["one"], CALLS["one"])
    form: Arguments | None = None
    if envelope is None and _json_cores(turns["one"], CALLS["one"]) is None:
        form = derived_arguments(Written(turns))
        if form is None:
            return None
    find = _Cores(envelope, form)
    found = {name: cores for name, turn in turns.items() if (cores := find(name, turn)) is not None}
    if "one" not in found:
        return None
    return _joined(turns, found, begun, ends, envelope, form)


def _joined(
    turns: Turns,
    found: Mapping[str, Sequence[Core]],
    begun: int,
    ends: Sequence[str],
    envelope: Envelope | None,
    form: Arguments | None,
) -> ToolSyntax | None:
    """Return the syntax, given the places of its calls."""
    alike = [name for name in ("one", "said", "thought", "both") if name in found]
    heads = [_named(turns[name][begun : found[name][0].start]) for name in alike]
    opener = heads[0][len(heads[0]) - shared_end(*heads) :].lstrip()
    after = _named(_ended(turns["one"][found["one"][0].end :], turns.get("plain", ""), ends))
    several = next((name for name in ("several", "several_counts") if name in found), None)
    if several is None:
        close, closing = after, ""
        return ToolSyntax("", opener, close, None, closing, envelope, form)
    first, second = found[several]
    turn = turns[several]
    last = _named(_ended(turn[second.end :], turns.get("plain", ""), ends))
    after = last if last.startswith(after) else after
    middle = _named(turn[first.end : second.start])
    close = middle[: shared_start(middle, after)]
    further = middle[len(close) :]
    opener, further = _numbered(opener, further)
    if envelope is not None:
        envelope = _numbered_envelope(envelope, turn[first.start : first.end], turn[second.start : second.end])
    size = shared_end(opener, further)
    return ToolSyntax(
        opener[: len(opener) - size],
        opener[len(opener) - size :],
        close,
        further[: len(further) - size],
        after[len(close) :],
        envelope,
        form,
    )


class _Cores:
    """Finder of the calls' places in a turn."""

    def __init__(self, envelope: Envelope | None, form: Arguments | None) -> None:
        self._envelope, self._form = envelope, form

    def __call__(self, name: str, turn: str) -> Sequence[Core] | None:
        probe = CALLS[name]
        if not probe.calls or name in ("rough", "slash", "typed", "tidy", "several_rough"):
            return None
        if self._form is not None:
            return _form_cores(turn, probe, self._form)
        if self._envelope is not None:
            return _envelope_cores(turn, probe, self._envelope)
        return _json_cores(turn, probe)


def _json_cores(turn: str, probe: ProbeAnswer) -> list[Core] | None:
    """Return the places of the arguments as JSON objects; None if they are not JSON objects."""
    found, at = list[Core](), 0
    for place, arguments in enumerate(probe.calls):
        named = turn.find(NAMES[place], at)
        objects = _objects(turn, max(named, at)) if named >= 0 else ()
        core = next(((start, end) for start, end, value in objects if value == arguments), None)
        if core is None:
            return None
        found.append(Core(*core))
        at = core[1]
    return found


def _objects(turn: str, at: int) -> Sequence[tuple[int, int, Any]]:
    """Return places and values of the JSON objects in a turn from `at` on, nested ones included."""
    found, decoder = [], json.JSONDecoder()
    while (at := turn.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(turn, at)
            found.append((at, end, value))
        except (ValueError, RecursionError):
            pass
        at += 1
    return found


def _envelope(turn: str, probe: ProbeAnswer) -> Envelope | None:
    """Return the smallest JSON object that holds a call's name and arguments; None if there is none."""
    name, arguments = NAMES[0], probe.calls[0]
    for start, end, value in reversed(_objects(turn, 0)):
        keys = {
            "name": next((key for key, each in value.items() if each == name), None),
            "arguments": next((key for key, each in value.items() if _is_arguments(each, arguments)), None),
        }
        if keys["name"] is None or keys["arguments"] is None:
            continue
        text = turn[start:end]
        inner = next(((a, b) for a, b, each in _objects(text, 1) if each == arguments), None)
        if inner is None:
            encoded = json.dumps(value[keys["arguments"]], ensure_ascii=False)
            at = text.find(encoded)
            if at < 0:
                return None
            inner = (at, at + len(encoded))
        before, after = _named(text[: inner[0]]), _named(text[inner[1] :])
        return Envelope(before, after, keys["name"], keys["arguments"])
    return None


def _is_arguments(value: Any, arguments: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return bool(value == arguments)


def _envelope_cores(turn: str, probe: ProbeAnswer, envelope: Envelope) -> list[Core] | None:
    found = list[Core]()
    for place, arguments in enumerate(probe.calls):
        begun = found[-1].end if found else 0
        fits = [
            Core(start, end)
            for start, end, value in _objects(turn, begun)
            if value.get(envelope.name_key) == NAMES[place]
            and _is_arguments(value.get(envelope.arguments_key), arguments)
        ]
        if not fits:
            return None
        found.append(fits[0])
    return found


def _form_cores(turn: str, probe: ProbeAnswer, form: Arguments) -> list[Core] | None:
    """Return where arguments are that are not a JSON object."""
    found, at = list[Core](), 0
    for place, arguments in enumerate(probe.calls):
        pairs = list(arguments.items())
        if not pairs or (named := turn.find(NAMES[place], at)) < 0 or (key := turn.find(pairs[0][0], named)) < 0:
            return None
        last, value = pairs[-1]
        text = str(value)
        key_of_last = turn.find(last, key)
        end = turn.find(text, key_of_last + len(last))
        after = form.after_text if isinstance(value, str) else form.after_other
        after = after.replace(KEY, last)
        if end < 0 or not turn.startswith(after, end + len(text)):
            return None
        found.append(Core(key - len(form.opening) - len(form.before_key), end + len(text) + len(after)))
        at = found[-1].end
    return found


def _named(text: str) -> str:
    """Return the text with placeholders for the tool's name and the call's id."""
    for name in NAMES:
        text = text.replace(name, NAME)
    for each in IDS:
        text = text.replace(each, ID)
    return text.replace(CONTENT, SAID).replace(REASON, SAID)


def _ended(text: str, plain: str, ends: Sequence[str]) -> str:
    """Return what follows a call, without the end that all turns share."""
    text = text[: len(text) - shared_end(text, plain)] if plain else text
    for end in ends:
        text = text.partition(end)[0] if end else text
    return text.rstrip() if not text.strip() else text


def _numbered(first: str, second: str) -> tuple[str, str]:
    """Return both texts with a placeholder where the first has the number 0 and the second the number 1."""
    a, b = list(first), list(second)
    for back in range(1, min(len(a), len(b)) + 1):
        if a[-back] == "0" and b[-back] == "1":
            a[-back] = b[-back] = INDEX
        elif a[-back] != b[-back]:
            break
    return "".join(a), "".join(b)


def _numbered_envelope(envelope: Envelope, first: str, second: str) -> Envelope:
    """Return the envelope with a placeholder for the call's number, if it holds one."""
    before, later = _named(first)[: len(envelope.before)], _named(second)[: len(envelope.before)]
    numbered, _ = _numbered(before, later)
    size = len(envelope.after)
    after, _ = _numbered(_named(first)[-size:], _named(second)[-size:]) if size else ("", "")
    return Envelope(numbered, after, envelope.name_key, envelope.arguments_key)
