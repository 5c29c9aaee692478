"""Calls of tools that max_tokens is about to cut are closed, in every family's way to write them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from kvferry.protocol.work import Grammar
from kvferry.router.text.parsers.families import CALLS
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.parsers.syntax import Tool
from kvferry.structured_output.interface import words_for
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary
from tests.api_parts import EOS
from tests.router.text.test_tool_grammars import NOW, tokenizers, written

NOTE = Tool(
    "note",
    {
        "type": "object",
        "properties": {"title": {"type": "string"}, "text": {"type": "string"}, "tags": {"type": "array"}},
        "required": ["title", "text"],
    },
)
BEGUN = {
    "hermes": "Well. <tool_call>\n{",
    "llama3_json": '{"name": "note", "parameters": {',
    "mistral": "Well. [TOOL_CALLS] [{",
    "pythonic": "[note(",
}


@cache
def library(marked: bool) -> LlguidanceBackend:
    tokenizer = tokenizers(marked)[0]
    return LlguidanceBackend(Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), (EOS,), ()))


def drawn(source: str, max_tokens: int, seed: int, *, marked: bool = False, begun: str = "") -> tuple[str, bool, int]:
    """An output by chance after what it begins with, whether it ended, and how many of its tokens closed it. It never
    ends by chance where it can go on."""
    tokenizer = tokenizers(marked)[0]
    matcher, chance = library(marked).compile(Grammar("lark", source)), random.Random(seed)
    first, tokens, chosen = tokenizer.encode(begun, add_special_tokens=False).ids, list[int](), 0
    bits = np.zeros(words_for(tokenizer.get_vocab_size()), dtype=np.int32)
    while len(tokens) < max_tokens:
        token = matcher.closing(max_tokens - len(tokens))
        chosen += token is not None
        if token is None:
            matcher.mask(bits)
            may = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            left: Sequence[int] = first[len(tokens) : len(tokens) + 1] or [each for each in may if each != EOS] or may
            token = chance.choice(left)
        if token == EOS:
            return tokenizer.decode(tokens, skip_special_tokens=False), True, chosen
        assert matcher.accept([token]) == 1
        tokens.append(token)
    return tokenizer.decode(tokens, skip_special_tokens=False), False, chosen


def called(family: str, text: str) -> list[tuple[str, object]]:
    parser = CALLS[family](["note", "now"])
    found = [parser.feed(text), parser.finish()]
    calls = merged([delta for each in found for delta in each.calls])
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("family", CALLS)
def test_a_call_is_closed(family: str, forced: bool, marked: bool) -> None:
    source = written(family, marked=marked, tools=(NOTE,), forced=forced, parallel=False)
    begun = "" if forced else BEGUN[family] if (family, marked) != ("mistral", True) else "Well. [TOOL_CALLS]note"
    for seed, max_tokens in enumerate((42, 71)):
        text, ended, _ = drawn(source, max_tokens, seed, marked=marked, begun=begun)
        assert ended, text
        ((name, arguments),) = called(family, text)
        assert name == "note"
        assert isinstance(arguments, dict)
        assert {"title", "text"} <= arguments.keys()


@pytest.mark.parametrize("family", CALLS)
def test_no_call_is_begun_for_which_there_is_no_room(family: str) -> None:
    """Calls of nothing follow one another for ever. A token that ends one and begins the next may be one too many."""
    source, whole = written(family, tools=(NOW,), forced=True), 0
    for max_tokens in range(60, 90, 5):
        text, ended, _ = drawn(source, max_tokens, max_tokens)
        whole += ended
        assert not ended or {name for name, _ in called(family, text)} == {"now"}
    assert whole >= 5


@pytest.mark.parametrize("family", CALLS)
def test_free_text_is_cut_wherever_it_is(family: str) -> None:
    source = written(family, tools=(NOTE, NOW))
    for seed in range(2):
        _, ended, chosen = drawn(source, 80, seed, begun="Once upon a time")
        assert (ended, chosen) == (False, 0)
