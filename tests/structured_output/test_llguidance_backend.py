"""The seam on the real library: what its matchers allow, with the demo model's vocabulary."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest

from kvferry.model_files.gguf_tokenizer import build_tokenizer
from kvferry.protocol.errors import ConfigError, GrammarFailed, InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.router.text.grammar_vocabulary import vocabulary_of
from kvferry.structured_output import lark
from kvferry.structured_output.interface import Matcher, words_for
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary
from tests.api_parts import demo_text
from tests.random_schemas import UNSUPPORTED
from tests.vocabularies import sentencepiece

EOS = 2


@cache
def library() -> LlguidanceBackend:
    return LlguidanceBackend(vocabulary_of(demo_text()))


def ids_of(text: str) -> list[int]:
    return demo_text().encode(text, add_special_tokens=False)


def allowed(matcher: Matcher) -> set[int]:
    size = demo_text().facts.vocab_size
    bits = np.zeros(words_for(size), dtype=np.int32)
    matcher.mask(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=size)).tolist())


def matches(grammar: Grammar, text: str) -> bool:
    matcher, ids = library().compile(grammar), ids_of(text)
    return matcher.accept(ids) == len(ids) and EOS in allowed(matcher)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAGGED = Grammar(
    "structural_tag",
    json.dumps({"structures": [{"begin": "<f=x>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f="]}),
)
TREE = Grammar(
    "structural_tag",
    json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                    {"type": "or", "elements": [
                        {"type": "const_string", "value": "none"},
                        {"type": "tag", "begin": "<j>", "content": {"type": "json_schema", "json_schema": OBJECT},
                         "end": "</j>"},
                    ]},
                ],
            },
        }
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("json_object", ""), '{"x": [1, null]}', "[1]"),
        (Grammar("json_schema", json.dumps(OBJECT)), '{"a": 17}', '{"a": "17"}'),
        (Grammar("json_schema", json.dumps(OBJECT)), '{"a": 17}', '{ "a" : 17 }'),
        (Grammar("json_object", ""), '{"a": 1, "b": ["x", {}]}', '{"a":1,\n"b":[]}'),
        (Grammar("json_schema", json.dumps(OBJECT), whitespace=" "), '{ "a" : 17 }', '{\n  "a": 17\n}'),
        (Grammar("json_schema", json.dumps(OBJECT), whitespace=""), '{"a":17}', '{"a": 17}'),
        (Grammar("json_schema", "true"), '[1, {"x": "é"}]', "[1"),
        (Grammar("regex", r"a/b\d+\n?"), "a/b17\n", "a/b"),
        (Grammar("choice", '["yes", "yes, \\"sir\\"", "日本"]'), 'yes, "sir"', "no"),
        (Grammar("ebnf", 'root ::= "a" b\nb ::= [0-9]+'), "a17", "b17"),
        (Grammar("lark", 'start: "a" N\nN: /[0-9]+/'), "a17", "a"),
        (TAGGED, 'Well <f=x>{"a": 1}</f> and so on', 'Well <f=x>{"b": 1}</f>'),
        (TREE, '<t>hm < hm</t><j>{"a": 1}</j>', "<t>hm</t>nothing"),
        (TREE, "<t></t>none", "none"),
    ],
)
def test_a_grammar_takes_what_it_should_and_nothing_else(grammar: Grammar, right: str, wrong: str) -> None:
    assert matches(grammar, right)
    assert not matches(grammar, wrong)


def test_a_composed_grammar_has_special_tokens_texts_and_schemas() -> None:
    """As a tool call is written; a special token and the text that looks like it are not the same."""
    call = lark.text("call é:\n")
    body = f"start: {lark.token(5)} {call} args {lark.text('<file_sep>')}\nargs: {lark.schema(OBJECT)}"
    matcher = library().compile(Grammar("lark", body))
    assert allowed(matcher) == {5}
    before = ids_of("call é:\n")
    assert matcher.accept([5, *before, *ids_of('{"a": 1}')]) == 1 + len(before) + len(ids_of('{"a": 1}'))
    assert 5 not in allowed(matcher)
    assert allowed(matcher) <= {
        i for i in range(49152) if b"<file_sep>".startswith(demo_text().tokenizer.token_bytes(i))
    }


@pytest.mark.parametrize("schema", UNSUPPORTED)
def test_a_keyword_that_cannot_be_enforced_is_refused_unless_leniency_is_asked_for(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        library().compile(Grammar("json_schema", json.dumps(schema)))
    if "$ref" not in schema:
        library().compile(Grammar("json_schema", json.dumps(schema), lenient=True))


def test_a_matcher_is_a_function_of_grammar_and_tokens() -> None:
    """Walked by chance, replayed, and rolled back, it says the same."""
    grammar, chance = Grammar("json_schema", json.dumps({**OBJECT, "additionalProperties": True})), random.Random(3)
    first, tokens, masks = library().compile(grammar), [], []
    for _ in range(25):
        masks.append(allowed(first))
        going_on = sorted(masks[-1] - {EOS})
        if not going_on:
            break
        tokens.append(chance.choice(going_on))
        assert first.accept(tokens[-1:]) == 1
    for count in range(0, len(tokens), 4):
        again = library().compile(grammar)
        assert again.accept(tokens[:count]) == count
        assert allowed(again) == masks[count]
    first.rollback(len(tokens) - 3)
    assert allowed(first) == masks[3]


@pytest.mark.parametrize("length", [9, 2000])
def test_a_grammar_that_counts_tokens_can_be_taken_back(length: int) -> None:
    grammar = Grammar("lark", f'start: free "!"\nfree[max_tokens={length}]: /(.|\\n)*/')
    tokens, matcher = (ids_of("one two three") * length)[:length], library().compile(grammar)
    for at in range(0, length, 7):
        assert matcher.accept(tokens[at : at + 7]) == len(tokens[at : at + 7])
    assert allowed(matcher) == set(ids_of("!"))
    matcher.rollback(5)
    assert len(allowed(matcher)) > 1000
    assert matcher.accept(tokens[-5:]) == 5
    assert allowed(matcher) == set(ids_of("!"))
    with pytest.raises(GrammarFailed, match="undone"):
        matcher.rollback(length + 1)


def test_a_token_that_is_not_allowed_is_not_taken() -> None:
    matcher = library().compile(Grammar("choice", '["ab"]'))
    assert matcher.accept(ids_of("xy")) == 0


def test_other_kinds_of_tokenizers_are_read_or_refused_by_name() -> None:
    pieces = build_tokenizer(sentencepiece())
    made = LlguidanceBackend(Vocabulary(pieces.to_str(), 280, (2,), ("</s>",)))
    matcher = made.compile(Grammar("regex", "abc+"))
    assert matcher.accept(pieces.encode("abcc", add_special_tokens=False).ids) >= 0
    with pytest.raises(ConfigError, match="end-of-sequence"):
        LlguidanceBackend(Vocabulary(pieces.to_str(), 280, (), ()))
    with pytest.raises(ConfigError, match="tokenizer"):
        LlguidanceBackend(Vocabulary("{}", 280, (2,), ()))
    misspelled = pieces.to_str().replace("<0x41>", "<0x4>")  # of which the library panics
    with pytest.raises(ConfigError, match="tokenizer"):
        LlguidanceBackend(Vocabulary(misspelled, 280, (2,), ()))
