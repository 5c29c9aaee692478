"""Body fields for structured output, in the forms of OpenAI, vLLM and llama.cpp, and the grammar they define.

OpenAI's response_format, vLLM's structured_outputs and its older guided_* names, llama.cpp's json_schema and grammar. A
request may have one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.router.text.parsers.output_parser import PLAIN, Parsing
from kvferry.router.text.parsers.syntax import closed
from kvferry.router.text.text_model import TextModel
from kvferry.structured_output.requested import of_kind, structured_outputs

RequestedGrammar = tuple[str, Grammar]
"""Name of the field, for errors, and its grammar."""
FORMATS = ("text", "json_object", "json_schema", "structural_tag", "regex", "grammar")
"""Supported types of response_format."""
KINDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "grammar": "grammar",
}  # fmt: skip
"""Kinds of grammars by the fields of vLLM's older form and of llama.cpp."""
_GIVEN = attrgetter("response_format", "structured_outputs", "gbnf", *[name for name in KINDS if name != "grammar"])
"""Reader of all fields that define a grammar."""
_NONE = (None,) * (len(KINDS) + 2)
JsonText = Annotated[dict[str, Any] | str | StrictBool | None, Field(description="A JSON schema, or its text")]


class StructuredFields(BaseModel):
    """Body fields that define a grammar of the output."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: JsonText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonText = None
    gbnf: Annotated[str | None, Field(alias="grammar", description="llama.cpp's name of guided_grammar")] = None

    def parsing(self, text: TextModel) -> Parsing:
        """Return the parsing options of the output; raise InvalidRequest."""
        return PLAIN

    def grammar(self, text: TextModel, prompt: Sequence[int]) -> RequestedGrammar | None:
        """Return the grammar for this prompt's output; raise InvalidRequest naming the field."""
        if _GIVEN(self) == _NONE:
            return None
        guided = [name for name in KINDS if self._value(name) is not None]
        formatted = format_grammar(self.response_format, "response_format")
        fields = [name for name in ("response_format",) if formatted is not None]
        fields += [name for name in ("structured_outputs",) if self.structured_outputs is not None]
        fields += guided
        if len(fields) > 1:
            raise InvalidRequest(
                f"{' and '.join(fields)} exclude each other: an output has one grammar", param=fields[1]
            )
        if formatted is not None:
            return "response_format", formatted
        if self.structured_outputs is not None:
            return "structured_outputs", structured_outputs(self.structured_outputs)
        if guided:
            name = guided[0]
            return name, of_kind(KINDS[name], self._value(name), self.guided_whitespace_pattern, name)
        return None

    def _value(self, field: str) -> Any:
        return (self.gbnf or None) if field == "grammar" else getattr(self, field)


def format_grammar(value: Mapping[str, Any] | None, param: str) -> Grammar | None:
    """Return the grammar of a response_format, in chat's nested or responses' flat form; None for any text."""
    kind = "text" if value is None else value.get("type", "text")
    if value is None or kind == "text":
        return None
    if kind == "json_object":  # llama.cpp and other servers accept a schema with it
        return Grammar("json_object", "") if value.get("schema") is None else _schema(value, param)
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        if not isinstance(inner, Mapping):
            raise InvalidRequest(f"{param}.json_schema must be an object", param=f"{param}.json_schema")
        return _schema(inner, f"{param}.json_schema" if inner is not value else param)
    if kind == "structural_tag":
        return Grammar("structural_tag", json.dumps(value))
    if kind == "regex":
        return of_kind("regex", value.get("pattern"), None, f"{param}.pattern")
    if kind == "grammar":
        return of_kind("grammar", value.get("grammar"), None, f"{param}.grammar")
    raise InvalidRequest(f"{param}.type must be one of {', '.join(FORMATS)}; got {kind!r}", param=f"{param}.type")


def _schema(inner: Mapping[str, Any], param: str) -> Grammar:
    """Return the grammar of a JSON schema.

    Without strict, unenforceable keywords are ignored and objects are limited to the properties they list. Otherwise a
    small model would invent properties until its tokens run out."""
    schema = inner.get("schema", {})
    if schema is None:
        schema = {}
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param}.schema must be a JSON schema", param=f"{param}.schema")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict must be true or false", param=f"{param}.strict")
    return Grammar("json_schema", json.dumps(schema if strict else closed(schema)), lenient=not strict)
