"""Outputs of JSON that max_tokens is about to cut are closed: they parse and validate."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvferry.protocol.work import Grammar
from kvferry.structured_output.forced_end import SPARE
from tests.random_schemas import random_schema
from tests.structured_output.test_llguidance_backend import EOS, allowed, demo_text, ids_of, library

ORDER = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "count": {"type": "integer"},
        "paid": {"type": "boolean"},
        "kind": {"enum": ["red", "green"]},
        "at": {"type": "string", "format": "date"},
        "part": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "rest": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["note", "count", "paid", "kind", "part", "rest"],
    "additionalProperties": False,
}


def drawn(grammar: Grammar, max_tokens: int, seed: int, *, deeper: bool = False) -> tuple[str, bool, int]:
    """An output by chance, whether it ended, and how many of its tokens were chosen to close it. deeper: what opens an
    object is drawn wherever it may be."""
    matcher, chance, tokens, chosen = library().compile(grammar), random.Random(seed), list[int](), 0
    for place in range(max_tokens):
        token = matcher.closing(max_tokens - place)
        chosen += token is not None
        if token is None:
            left = sorted(allowed(matcher))
            opening = [each for each in left if "{" in demo_text().tokenizer.token(each)] if deeper else []
            token = chance.choice(opening or left)
        if token == EOS:
            return demo_text().tokenizer.decode(tokens), True, chosen
        assert matcher.accept([token]) == 1
        tokens.append(token)
    return demo_text().tokenizer.decode(tokens), False, chosen


@pytest.mark.parametrize("max_tokens", [52, 60, 90])
def test_an_output_within_an_endless_text_is_closed(max_tokens: int) -> None:
    for seed in range(3):
        text, ended, chosen = drawn(Grammar("json_schema", json.dumps(ORDER)), max_tokens, seed)
        assert ended, text
        assert chosen > 20
        jsonschema.validate(json.loads(text), ORDER)


def test_any_object_and_a_bare_number_are_closed() -> None:
    for seed in range(4):
        text, ended, _ = drawn(Grammar("json_object", ""), 40, seed)
        assert ended
        assert isinstance(json.loads(text), dict)
        text, ended, _ = drawn(Grammar("json_schema", '{"type": "number", "minimum": 10}'), 12, seed)
        assert ended
        assert json.loads(text) >= 10


@pytest.mark.parametrize(
    ("schema", "begun"),
    [
        ({"type": "string", "format": "email"}, '"cur-1b9fab'),
        ({"type": "string", "format": "duration"}, '"P64787'),
        ({"type": "object", "additionalProperties": {"type": "integer", "maximum": -11}}, '{"k6": -40, "k8": -1'),
        ({"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]+ [A-Z]{3}$"}}, '["Ab'),
    ],
)
def test_what_has_a_form_of_its_own_is_closed(schema: dict[str, Any], begun: str) -> None:
    matcher, tokens = library().compile(Grammar("json_schema", json.dumps(schema))), ids_of(begun)
    assert matcher.accept(tokens) == len(tokens)
    for room in range(14, 0, -1):
        token = matcher.closing(room)
        token = EOS if token is None and EOS in allowed(matcher) else token
        if token == EOS:
            break
        if token is not None:
            assert matcher.accept([token]) == 1
            tokens.append(token)
    jsonschema.Draft202012Validator(schema).validate(json.loads(demo_text().tokenizer.decode(tokens)))


def test_random_schemas_are_closed_as_a_rule() -> None:
    """Some need more tokens than there are."""
    ended = 0
    for number in range(60):
        schema: Any = random_schema(number)
        text, whole, _ = drawn(Grammar("json_schema", json.dumps(schema)), 64, number)
        ended += whole
        if whole:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert ended >= 54


def test_nothing_is_opened_for_which_there_is_no_room() -> None:
    node = {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    found = [drawn(Grammar("json_schema", json.dumps(schema)), 60, seed, deeper=True) for seed in range(4)]
    assert all(ended and chosen < 5 for _, ended, chosen in found)
    for text, _, _ in found:
        jsonschema.validate(json.loads(text), schema)


def test_a_matcher_is_left_as_it_was_and_other_grammars_are_not_closed() -> None:
    matcher = library().compile(Grammar("json_object", ""))
    before = np.array(sorted(allowed(matcher)))
    assert matcher.closing(60) is None
    assert matcher.closing(3) is not None
    assert (np.array(sorted(allowed(matcher))) == before).all()
    assert library().compile(Grammar("regex", "a+b")).closing(2) is None


@pytest.mark.parametrize(("room", "closes"), [(SPARE + 1, True), (SPARE + 2, False)])
def test_the_end_of_what_was_closed_elsewhere_closes_it(room: int, closes: bool) -> None:
    """The one token left there is the end; a new matcher knows by the room alone that it was made for it."""
    matcher, tokens = library().compile(Grammar("json_schema", '{"enum": ["red"]}')), ids_of('"red"')
    assert matcher.accept(tokens) == len(tokens)
    assert allowed(matcher) == {EOS}
    assert matcher.closing(room) == (EOS if closes else None)
