from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.model_files.gguf_tokenizer import build_tokenizer
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
    detokenizer,
)
from tests.api_parts import demo_text
from tests.vocabularies import CHARS, sentencepiece

SP = TextTokenizer(build_tokenizer(sentencepiece()))
TEXT = st.text(CHARS, max_size=40) | st.text("a👩‍👧é漢🏳️‍🌈 1", max_size=30)
BAD = "\N{REPLACEMENT CHARACTER}"
PIECES = [*"ab c1é漢", BAD, "e\u0301", "😀", "👩‍👧", "🏳️‍🌈"]


def run(steps: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(steps.feed, ids), steps.finish()]


@given(TEXT)
@settings(max_examples=200, deadline=None)
def test_characters_come_out_whole(text: str) -> None:
    tokenizer = demo_text().tokenizer
    for steps in (ByteDetokenizer(tokenizer, frozenset()), WindowDetokenizer(tokenizer, frozenset())):
        shown = run(steps, demo_text().encode(text))
        assert "".join(shown) == text
        assert BAD in text or not any(BAD in part for part in shown)


@given(st.lists(st.integers(0, 49151) | st.integers(17, 272), max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_tokens_give_what_decoding_all_of_them_gives(ids: list[int]) -> None:
    tokenizer = demo_text().tokenizer
    for skip in (True, False):
        shown = run(detokenizer(tokenizer, skip_special_tokens=skip), ids)
        assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.lists(st.integers(0, 49151) | st.integers(17, 272), min_size=1, max_size=3), max_size=12))
@settings(max_examples=200, deadline=None)
def test_escaped_texts_are_those_that_are_fed(parts: list[list[int]]) -> None:
    tokenizer = demo_text().tokenizer
    mixed, fed = detokenizer(tokenizer), detokenizer(tokenizer)
    for ids in parts:
        escaped, text = mixed.escaped(ids), "".join(map(fed.feed, ids))
        assert not escaped or json.loads(b'"%b"' % escaped) == text
        if not escaped:
            assert "".join(map(mixed.feed, ids)) == text
    assert mixed.finish() == fed.finish()


def test_texts_are_escaped_unless_hidden_or_cut_off() -> None:
    tokenizer = demo_text().tokenizer
    steps, (quote, *_) = detokenizer(tokenizer), demo_text().encode('"')
    assert steps.escaped([quote]) == b'\\"'
    assert steps.escaped([quote, *tokenizer.special_ids]) == b""
    first, *_ = demo_text().encode("漢")
    assert not steps.feed(first)
    assert steps.escaped([quote]) == b""
    assert detokenizer(SP).escaped([40]) == b""


def test_a_character_cut_off_by_the_end_is_replaced_once() -> None:
    tokenizer = demo_text().tokenizer
    ids = demo_text().encode("漢🏳")
    assert len(ids) > 4
    shown = run(detokenizer(tokenizer), ids[:-1])
    assert "".join(shown[:-1]) == "漢"
    assert shown[-1] == BAD


@given(st.text("abc é漢🏳", max_size=16))
@settings(deadline=None)
def test_sentencepiece_bytes_and_spaces(text: str) -> None:
    ids = SP.library.encode(text, add_special_tokens=False).ids
    shown = run(detokenizer(SP), ids)
    assert "".join(shown) == text
    assert not any(BAD in part for part in shown)


def test_output_that_continues_a_prompt_keeps_its_leading_space() -> None:
    prompt, word = SP.library.encode("abc").ids, SP.library.encode("ab", add_special_tokens=False).ids
    assert run(detokenizer(SP, prompt), word) == [" ab", ""]
    assert run(detokenizer(SP, [1]), word) == ["ab", ""]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    tokenizer = demo_text().tokenizer
    ids = demo_text().encode("a<|im_end|>b")
    assert "".join(run(detokenizer(tokenizer), ids)) == "ab"
    assert "".join(run(detokenizer(tokenizer, skip_special_tokens=False), ids)) == "a<|im_end|>b"


def test_what_is_shown_for_a_special_token_ends_a_character_and_stands_among_the_text() -> None:
    own, sentencepieces = demo_text().tokenizer, SP
    end = own.library.token_to_id("<|im_end|>")
    ids = [*demo_text().encode("ab"), end, *demo_text().encode(" é")]
    assert "".join(run(detokenizer(own, shown={end: "!"}), ids)) == "ab! é"
    assert "".join(run(detokenizer(own, shown={end: "!"}, skip_special_tokens=False), ids)) == "ab! é"
    cut = demo_text().encode("漢")[:1]
    assert run(detokenizer(own, shown={end: "!"}), [*cut, end, *cut]) == ["", f"{BAD}!", "", BAD]
    special = min(sentencepieces.special_ids)
    words = sentencepieces.library.encode("ab é", add_special_tokens=False).ids
    for skip in (True, False):
        steps = detokenizer(sentencepieces, shown={special: "!"}, skip_special_tokens=skip)
        assert "".join(run(steps, [*words, special, *words])) == "ab é! ab é"


def test_bytes_that_are_no_character_do_not_hold_the_text_back_forever() -> None:
    window = WindowDetokenizer(SP, frozenset())
    for steps in (FallbackDetokenizer(SP, frozenset()), window):
        lone = SP.library.encode("é", add_special_tokens=False).ids[-1]
        shown = [steps.feed(lone) for _ in range(200)]
        assert sum(map(len, shown)) > 150
    assert len(window._window) < 20


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join))
@example("😀 😀😀🏳️‍🌈")
@example("ab\ufffd\ufffd😀 a")
@settings(max_examples=300, deadline=None)
def test_output_behind_any_part_of_a_text_completes_it(text: str) -> None:
    """A character that the prompt begins and the output ends belongs to the output, once, as soon as it is whole."""
    ids = SP.library.encode(text).ids
    assert SP.decode(ids) == text
    for cut in range(1, len(ids) + 1):
        before = b"".join(map(SP.token_bytes, ids[1:cut])).decode(errors="ignore").removeprefix(" ")
        shown = run(detokenizer(SP, ids[:cut]), ids[cut:])
        assert (before + "".join(shown)).removeprefix(" ") == text.removeprefix(" ")
        assert shown[-1] == ""
