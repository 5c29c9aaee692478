"""A call on a channel that max_tokens is about to cut is closed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kvferry.protocol.work import Grammar
from kvferry.router.text.detokenizer import detokenizer
from kvferry.router.text.parsers.harmony import HarmonyParser, marks
from kvferry.router.text.parsers.harmony_syntax import grammar
from kvferry.router.text.parsers.syntax import Tool
from kvferry.structured_output import lark
from kvferry.structured_output.interface import words_for
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary
from tests.harmony_model import ANALYSIS, ON, harmony_text

NOTE = Tool(
    "note",
    {
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array"}},
        "required": ["title", "text"],
    },
)
BEGUN = f'{ANALYSIS}Hm.{ON}<|channel|>commentary to=functions.note <|constrain|>json<|message|>{{"ti'


@pytest.mark.parametrize("forced", [True, False])
def test_a_call_is_closed(forced: bool) -> None:
    text = harmony_text()
    tokenizer, ends, size = text.tokenizer.library, text.facts.eos_token_ids, text.facts.vocab_size
    library = LlguidanceBackend(Vocabulary(tokenizer.to_str(), size, ends, text.tokenizer.special_texts))
    source = grammar(
        [NOTE], lambda marker: lark.token(tokenizer.token_to_id(marker)), forced=forced, parallel=False, lead=""
    )
    matcher, chance = library.compile(Grammar("lark", source)), random.Random(0)
    begun, tokens = text.encode(BEGUN, add_special_tokens=False), list[int]()
    bits = np.zeros(words_for(size), dtype=np.int32)
    while len(tokens) < 80:
        token = matcher.closing(80 - len(tokens))
        if token is None:
            matcher.mask(bits)
            may = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            going_on = [each for each in may if each not in ends] or may
            token = chance.choice(begun[len(tokens) : len(tokens) + 1] or going_on)
        if token in ends:
            break
        assert matcher.accept([token]) == 1
        tokens.append(token)
    assert len(begun) < len(tokens) < 80
    steps, parser = detokenizer(text.tokenizer, shown=marks(text.tokenizer)), HarmonyParser(["note"], patient=True)
    found = [*parser.feed("".join(map(steps.feed, tokens))), *parser.finish()]
    ((call,),) = [each.calls for each in found if each.calls]
    assert (call.name, json.loads(call.arguments).keys() >= {"title", "text"}) == ("note", True)
