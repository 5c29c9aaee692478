"""Structural tags: translates constrained regions of an output, in two client notations, into Lark text.

    {"type": "structural_tag", "triggers": [text], "structures": [{"begin": text, "schema": ..., "end": text}]}

allows free text in which a trigger opens one of the structures that begin with it. The other notation is a tree of
formats:

    {"type": "structural_tag", "format": {"type": ..., ...}}

Supported types: const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags. The type grammar is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.protocol.errors import InvalidRequest
from kvferry.structured_output import lark

Schema = Callable[[Any], str]
"""Returns Lark text for a JSON schema."""
_ANY = r"/(.|\n)*/"


def structural_tag(value: Any, schema: Schema) -> str:
    """Return the Lark text of either notation. Raises InvalidRequest."""
    if not isinstance(value, dict) or not ("format" in value or {"structures", "triggers"} <= value.keys()):
        raise InvalidRequest("a structural tag is an object with a format, or with structures and triggers")
    rules = _Rules(schema)
    if "format" in value:
        start = rules.format(value["format"], last=True)
    else:
        tags = [_tag_of(structure) for structure in _objects(value["structures"], "structures")]
        start = rules.triggered(_texts(value["triggers"], "triggers"), tags)
    return "\n".join([f"start: {start}", *rules.lines])


def _tag_of(structure: dict[str, Any]) -> dict[str, Any]:
    """Return a structure of the first notation as a tag of the second."""
    content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end", "")}


class _Rules(lark.RuleLines):
    """Writer of Lark rules. Every method returns an expression for its argument."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self._schema = schema

    def format(self, value: Any, *, last: bool = False, end: str | None = None) -> str:
        """Return an expression for a format. last: nothing follows. end: the text that ends free text."""
        if not isinstance(value, dict):
            raise InvalidRequest("a format of a structural tag is an object")
        match value.get("type"):
            case "const_string":
                return lark.text(_text(value, "value"))
            case "json_schema":
                return self.rule(self._schema(value.get("json_schema", {})))
            case "regex":
                return self.terminal(lark.terminal(_text(value, "pattern")))
            case "any_text":
                return self._any(last, end)
            case "sequence":
                parts = _objects(value.get("elements"), "elements")
                return self._group(" ", [self.format(p, last=last and p is parts[-1]) for p in parts])
            case "or":
                return self._group(
                    " | ", [self.format(p, last=last) for p in _objects(value.get("elements"), "elements")]
                )
            case "tag":
                return self._tag(value)
            case "triggered_tags":
                once = bool(value.get("at_least_one")) or bool(value.get("stop_after_first"))
                if once or not last:
                    raise InvalidRequest(
                        "triggered_tags must be the last format, without at_least_one and stop_after_first"
                    )
                return self.triggered(_texts(value.get("triggers"), "triggers"), _objects(value.get("tags"), "tags"))
            case other:
                raise InvalidRequest(f"the structural tag format {other!r} is not supported")

    def triggered(self, triggers: Sequence[str], tags: Sequence[dict[str, Any]]) -> str:
        """Return an expression for free text in which each trigger opens one of the tags that begin with it."""
        free = self.terminal(_ANY)
        choices = []
        for trigger in triggers:
            own = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not own:
                raise InvalidRequest(f"no structure matches the trigger {trigger!r}")
            head = self.rule(f"{free} {lark.text(trigger)}", "[lazy]")
            choices.append(f"{head} {self._group(' | ', [self._tag(tag, opened=len(trigger)) for tag in own])}")
        for tag in tags:
            if not any(_text(tag, "begin").startswith(trigger) for trigger in triggers):
                raise InvalidRequest(f"no trigger matches the structure that begins with {tag['begin']!r}")
        return f"{self._group(' | ', choices)}* {free}"

    def _tag(self, tag: dict[str, Any], opened: int = 0) -> str:
        begin, end = _text(tag, "begin")[opened:], _text(tag, "end")
        parts = [lark.text(begin)] if begin else []
        parts.append(self.format(tag.get("content"), end=end))
        if end and tag["content"].get("type") != "any_text":
            parts.append(lark.text(end))
        return self._group(" ", parts)

    def _any(self, last: bool, end: str | None) -> str:
        """Return an expression for free text, up to and including `end` if there is one."""
        if end:
            return self.rule(f"{self.terminal(_ANY)} {lark.text(end)}", "[lazy]")
        if not last:
            raise InvalidRequest("any_text must be the last format, or within a tag that has an end")
        return self.terminal(_ANY)

    def _group(self, joint: str, parts: Sequence[str]) -> str:
        return f"({joint.join(parts)})"


def _text(value: dict[str, Any], field: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field} of a structural tag must be a string")
    return text


def _texts(value: Any, field: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{field} of a structural tag must be a list of non-empty strings")
    return value


def _objects(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"{field} of a structural tag must be a non-empty list of objects")
    return value
