"""Derives how a template writes call arguments that are not a JSON object, from calls with zero to two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvferry.router.text.parsers.derived.differences import shared_end, shared_start
from kvferry.router.text.parsers.derived.probes import COUNTS, KEYS, NAMES, NUMBERS, PLAIN, ROUGH, TEXTS, TYPED
from kvferry.router.text.parsers.derived.syntax import KEY, Arguments


@dataclass(frozen=True, slots=True)
class Written:
    """Texts that a template wrote, by probe."""

    turns: Mapping[str, str]

    def behind_name(self, probe: str) -> str:
        """Return what follows the tool's name, at its last place before the first argument; empty if there is none."""
        turn = self.turns.get(probe, "")
        keys = [at for key in (*KEYS, *COUNTS) if (at := turn.find(key)) >= 0]
        at = turn.rfind(NAMES[0], 0, min(keys)) if keys else turn.rfind(NAMES[0])
        return turn[at + len(NAMES[0]) :] if at >= 0 else ""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Texts around one or two arguments: before the first key, between key and value, between them, and after all."""

    before: str
    middle: str
    between: str
    after: str


def derived_arguments(written: Written) -> Arguments | None:
    """Return how arguments are written; None if that cannot be derived."""
    texts, text = _parts(written, "two", KEYS, TEXTS), _parts(written, "one", KEYS[:1], TEXTS[:1])
    numbers = _parts(written, "counts", COUNTS, tuple(map(str, NUMBERS)))
    number = _parts(written, "count", COUNTS[:1], tuple(map(str, NUMBERS[:1])))
    none = written.behind_name("none")
    if texts is None or text is None or numbers is None or number is None or not none:
        return None
    opening = texts.before[: shared_start(texts.before, none)]
    before_key = texts.before[len(opening) :]
    after_other = numbers.between[: shared_start(numbers.between, number.after)]
    after_text = texts.between[: shared_start(texts.between, text.after)]
    separator = numbers.between[len(after_other) :]
    if before_key and not separator.endswith(before_key):
        return None
    separator = separator[: len(separator) - len(before_key)]
    if after_text + separator + before_key != texts.between:
        return None
    lead = len(opening[len(opening) - shared_end(opening, after_text, after_other) :].lstrip(">\"')} \n"))
    if lead and not separator and (mark := opening[-lead:]).strip():  # it begins each key instead of ending each value
        opening, before_key = opening[:-lead], mark + before_key
        after_text, after_other = after_text[:-lead], after_other[:-lead]
    form = Arguments(opening, before_key, texts.middle, numbers.middle, after_text, after_other, separator)
    form = replace(form, none=_blanks_beyond(none[len(opening) :], text.after[len(after_text) :]))
    return _with_values(form, written)


def _blanks_beyond(text: str, other: str) -> str:
    """Return the leading blanks that `text` has beyond the number of those of `other`."""
    more = (len(text) - len(text.lstrip())) - (len(other) - len(other.lstrip()))
    return text[: max(0, more)]


def _parts(written: Written, probe: str, keys: tuple[str, ...], values: tuple[str, ...]) -> _Parts | None:
    rest, cuts = written.behind_name(probe), list[str]()
    for key, value in zip(keys, values, strict=True):
        for sought in (key, value):
            before, found, rest = rest.partition(sought)
            if not found:
                return None
            cuts.append(before)
    rest = rest.replace(keys[-1], KEY)
    between = cuts[2].replace(keys[0], KEY) if len(keys) > 1 else ""
    return _Parts(cuts[0], cuts[1], between, rest)


def _with_values(form: Arguments, written: Written) -> Arguments:
    """Return the form, completed with the way special values are written."""
    rough = written.turns.get("rough", "")
    wrapped = ("", "")
    if (at := rough.find(ROUGH)) >= 0:
        before, after = rough[:at], rough[at + len(ROUGH) :]
        if not before.endswith(form.before_text) and (place := before.rfind(form.before_text)) >= 0:
            close = after.find(form.after_text.replace(KEY, KEYS[0]))
            wrapped = (before[place + len(form.before_text) :], after[: max(0, close)])
    turn, expected = written.turns.get("typed", ""), TYPED
    if not turn:
        turn, expected = written.turns.get("tidy", ""), PLAIN
    places = [at for key in expected if (at := turn.find(key)) >= 0]
    form = replace(form, wrapped=wrapped, is_sorted=places != sorted(places))
    values = {key: _value(turn, form, key) for key in expected}
    named = (("kvt_yes", "true"), ("kvt_no", "false"), ("kvt_nul", "null"))
    yes, no, null = (values.get(key) or word for key, word in named)
    nested = values.get("kvt_obj", "")
    lists = values.get("kvt_list", "")
    slash = written.turns.get("slash", "")
    as_json = _is_json(nested, expected["kvt_obj"]) and _is_json(lists, expected["kvt_list"])
    tree = _item_key(turn, form) if not as_json and form.after_other.strip() else ""
    return replace(
        form,
        words=(yes, no, null),
        as_json=as_json,
        as_tree=tree,
        escaped="a\\\\n" in slash,
        quoted_keys=not nested.replace(" ", "").startswith("{a:"),
    )


def _value(turn: str, form: Arguments, key: str) -> str:
    """Return the text of a typed value, up to what follows it."""
    at = turn.find(key)
    if at < 0 or not turn.startswith(form.before_other, start := at + len(key)):
        return ""
    start += len(form.before_other)
    if form.after_other.strip():
        end = turn.find(form.after_other.replace(KEY, key), start)
        return turn[start:end] if end >= 0 else ""
    rest = turn[start:]
    return rest if rest[:1] in ("[", "{") else rest.partition(form.separator.strip() or ",")[0]


def _is_json(text: str, value: Any) -> bool:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return False
    return bool(found == value)


def _item_key(turn: str, form: Arguments) -> str:
    """Return the key of a list's items if they are written as nested parameters; empty if not."""
    at = turn.find("kvt_list" + form.before_other)
    if at < 0:
        return ""
    rest = turn[at + len("kvt_list" + form.before_other) :]
    place = rest.find(form.before_key)
    if place < 0 or not form.before_key:
        return ""
    key = rest[place + len(form.before_key) :].partition(form.before_other)[0]
    return key if key.isidentifier() and len(key) <= 32 and not key.startswith("kvt_") else ""
