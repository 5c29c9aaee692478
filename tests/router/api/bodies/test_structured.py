"""Fields that ask for a grammar: what they become, and what is refused before any node hears of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.router.api.bodies.structured import format_grammar
from kvferry.router.text.grammar_vocabulary import vocabulary_of
from kvferry.structured_output import to_lark
from kvferry.structured_output.checker import Checker
from tests.api_parts import Api, FakeCluster, demo_text, error_of, says

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.fixture
def api() -> Api:
    return Api(FakeCluster(says("x")))


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


ACCEPTED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    ({"response_format": named(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA), lenient=True)),
    ({"response_format": named(SCHEMA, strict=True)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "a+b"}, Grammar("regex", "a+b")),
    ({"guided_choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"json_schema": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"grammar": "", "guided_regex": "a"}, Grammar("regex", "a")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", json.dumps(SCHEMA), lenient=True),
    ),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Grammar("json_schema", json.dumps(SCHEMA), whitespace=""),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        Grammar("json_schema", json.dumps(SCHEMA), whitespace=" ?"),
    ),
    ({"structured_outputs": {"structural_tag": TAG}}, Grammar("structural_tag", json.dumps(TAG))),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        Grammar("structural_tag", json.dumps({"type": "structural_tag", **TAG})),
    ),
]


async def test_every_way_to_ask_reaches_the_nodes_as_a_grammar(api: Api) -> None:
    for body, grammar in ACCEPTED:
        for answer in (await api.chat(**body), await api.complete(**body)):
            assert answer.status_code == 200, (body, answer.text)
            assert api.cluster.grammar == grammar


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"response_format": named({"type": "array", "uniqueItems": True}, strict=True)}, "uniqueItems"),
    ({"guided_json": {"$ref": "#"}}, "allows no output"),
    ({"guided_json": "{"}, "not valid JSON"),
    ({"guided_regex": "(" * 70 + ")" * 70}, f"limit is {to_lark.MAX_DEPTH}"),
    ({"guided_regex": "x" * (to_lark.MAX_SOURCE + 1)}, f"limit is {to_lark.MAX_SOURCE}"),
    ({"guided_regex": "((((a{100}){100}){100}){100})"}, "limit"),
    ({"guided_regex": "(unclosed"}, "regex"),
    ({"guided_regex": "a+", "use_beam_search": True}, "beam search"),
    ({"guided_choice": [str(i) for i in range(to_lark.MAX_CHOICES + 1)]}, f"limit is {to_lark.MAX_CHOICES}"),
    ({"guided_grammar": 'start: "a" missing'}, "missing"),
    (
        {"guided_grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"'},
        "limit",
    ),
]


async def test_what_cannot_be_used_is_a_400_that_says_why(api: Api) -> None:
    for body, said in HOSTILE:
        answer = await api.http.post(
            "/v1/chat/completions",
            content=json.dumps({"messages": [{"role": "user", "content": "x"}], **body}),
        )
        assert answer.status_code == 400, (body, answer.text)
        error = error_of(answer)
        assert said in error["message"], (body, error)
        assert error["param"] == next(iter(body))
    assert not api.cluster.dispatches


async def test_not_strict_leaves_out_what_cannot_be_enforced(api: Api) -> None:
    answer = await api.chat(response_format=named({"type": "array", "uniqueItems": True, "maxItems": 2}))
    assert answer.status_code == 200


def test_the_flat_form_of_responses_is_read_too() -> None:
    flat = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    assert format_grammar(flat, "text.format") == Grammar("json_schema", json.dumps(SCHEMA))
    assert format_grammar(None, "text.format") is None


def test_objects_that_list_their_properties_have_no_others_unless_they_say_so() -> None:
    listed = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    open_ = {"type": "object", "properties": {}, "additionalProperties": True}

    def made(schema: dict[str, Any], **more: bool) -> Any:
        found = format_grammar({"type": "json_schema", "json_schema": {"schema": schema, **more}}, "response_format")
        assert found
        return json.loads(found.source)

    shut = {"type": "object", "properties": {}, "additionalProperties": False}
    assert made(listed) == {"type": "object", "properties": {"a": shut}, "additionalProperties": False}
    assert made(open_) == open_
    assert made(listed, strict=True) == listed


async def test_a_process_that_dies_is_replaced_and_its_killer_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends at a word of the grammar, where the real one would for want of memory."""
    code = (
        "import sys, json\n"
        "sys.stdin.readline(); print('[-1, null]', flush=True)\n"
        "for line in sys.stdin:\n"
        "    number, grammar = json.loads(line)\n"
        "    if 'die' in grammar[1]: sys.exit(3)\n"
        "    if 'hang' not in grammar[1]: print(json.dumps([number, None]), flush=True)\n"
    )
    checker = Checker(lambda: vocabulary_of(demo_text()), (sys.executable, "-c", code))
    monkeypatch.setattr("kvferry.structured_output.checker.CHECK_S", 0.3)
    try:
        await checker.check(Grammar("regex", "fine"), "guided_regex")
        with pytest.raises(InvalidRequest, match="crashed the process"):
            await checker.check(Grammar("regex", "die"), "guided_regex")
        with pytest.raises(InvalidRequest, match="limit"):
            await checker.check(Grammar("regex", "hang"), "guided_regex")
        await checker.check(Grammar("regex", "fine too"), "guided_regex")
    finally:
        await checker.close()
