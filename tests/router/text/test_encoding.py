"""What cannot fit is refused before it is encoded, nothing that fits is refused, and the event loop goes on."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.protocol.errors import ContextLengthExceeded, InvalidRequest
from kvferry.router.text.encoding import TRUNCATED_CHARS, Bound, Encoder
from kvferry.router.text.length_bound import LengthBound, length_bound_of
from kvferry.router.text.text_model import TextModel
from tests.api_parts import demo_text

TOKENS = 8192
BOUND = Bound(TOKENS, "prompt")
LONGEST = "\n" + " " * 80
"""The demo model's longest token."""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(demo_text())


async def test_twenty_megabytes_are_refused_at_once(encoder: Encoder) -> None:
    for text in ("word " * 4_000_000, "é日" * 10_000_000):
        began = time.perf_counter()
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 8192 tokens") as caught:
            await encoder.encode([text], BOUND, add_special_tokens=False)
        assert time.perf_counter() - began < 2
        assert caught.value.param == "prompt"


async def test_a_text_of_the_longest_tokens_fits_to_the_last_one(encoder: Encoder) -> None:
    text = LONGEST * 2000
    bound = Bound(2000, "prompt")
    (ids,) = await encoder.encode([text], bound, add_special_tokens=False)
    assert len(ids) == 2000
    with pytest.raises(ContextLengthExceeded):
        await encoder.encode([text + "a"], bound, add_special_tokens=False)


async def test_a_long_text_of_short_tokens_is_given_up_early(encoder: Encoder) -> None:
    """Below the length that no token can reach, but far above the context."""
    text = "日本語" * 200_000
    counted: list[int] = []

    class Counting(TextModel):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            counted.append(len(text))
            return super().encode(text, add_special_tokens=add_special_tokens)

    demo = demo_text()
    counting = Encoder(Counting(demo.called, demo.tokenizer, demo.template, demo.facts))
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        await counting.encode([text], BOUND, add_special_tokens=False)
    assert sum(counted) < 100_000


async def test_what_is_truncated_may_be_longer_but_not_endless(encoder: Encoder) -> None:
    bound = Bound(TOKENS, "prompt", truncated=True)
    text = "word " * 40_000
    (ids,) = await encoder.encode([text], bound, add_special_tokens=False)
    assert ids == demo_text().encode(text, add_special_tokens=False)
    with pytest.raises(InvalidRequest, match=f"at most {TRUNCATED_CHARS} can be truncated"):
        await encoder.encode(["x" * (TRUNCATED_CHARS + 1)], bound, add_special_tokens=False)


@given(texts=st.lists(st.text(max_size=300).map(lambda text: text * 20), max_size=12), marked=st.booleans())
@settings(max_examples=40, deadline=None)
async def test_ids_are_those_of_each_text_by_itself(texts: list[str], marked: bool) -> None:
    found = await Encoder(demo_text()).encode(texts, BOUND, add_special_tokens=marked)
    library = demo_text().tokenizer.library
    assert found == [library.encode(text, add_special_tokens=marked).ids for text in texts]


@given(st.text(max_size=400) | st.text("\x04\x06\x13 \n#=-\U00050000", max_size=400).map(lambda text: text * 9))
@settings(max_examples=300, deadline=None)
def test_no_tokens_reach_further_than_they_are_said_to(text: str) -> None:
    reach, ids = length_bound_of(demo_text().tokenizer.library), demo_text().encode(text, add_special_tokens=False)
    most = reach.max_chars(len(ids))
    assert most is not None
    assert reach.min_chars(text) <= most


async def test_the_event_loop_goes_on_while_a_long_prompt_is_encoded(encoder: Encoder) -> None:
    gaps, ended = [], asyncio.Event()

    async def beat() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beating = asyncio.create_task(beat())
    text = " ".join(random.Random(1).choices(("river", "stone", "cloud", "market"), k=120_000))
    began = time.perf_counter()
    await encoder.encode([text], Bound(TOKENS * 64, "prompt"), add_special_tokens=False)
    took = time.perf_counter() - began
    ended.set()
    await beating
    assert took > 4 * max(gaps), (took, max(gaps))
    assert max(gaps) < 0.25


async def test_who_leaves_while_its_text_waits_is_let_go_at_once(encoder: Encoder) -> None:
    text = "river stone cloud market " * 10_000
    waiting = [
        asyncio.create_task(encoder.encode([text], Bound(TOKENS * 64, "prompt"), add_special_tokens=False))
        for _ in range(64)
    ]
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert time.perf_counter() - began < 0.3
    (ids,) = await encoder.encode(["a" * 5000], BOUND, add_special_tokens=False)
    assert ids


ALPHABET = {char: place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {"<unk>": 0, "▁": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}


def bpe(normalizer: Any = None, pre: Any = None, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(merges=[], **options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("tokenizer", "most"),
    [
        (bpe(vocab=ALPHABET, pre=BYTES), 10),
        (bpe(vocab=ALPHABET, pre=BYTES, normalizer=normalizers.NFC()), 40),
        (bpe(vocab=ALPHABET, pre=BYTES, normalizer=normalizers.Strip()), None),
        (bpe(vocab=ALPHABET, pre=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])), None),
        (bpe(vocab=ALPHABET, pre=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), BYTES])), 10),
        (bpe(vocab=FALLBACK, byte_fallback=True, normalizer=normalizers.Replace(" ", "▁")), 60),
        (bpe(vocab=FALLBACK, unk_token="<unk>", fuse_unk=True), None),
        (bpe(vocab={"a": 0}, pre=BYTES), None),
        (Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")), None),
    ],
    ids=["bytes", "composed", "stripped", "spaces-dropped", "cut", "fallback", "unknown", "few-bytes", "words"],
)
def test_which_tokenizers_have_a_bound(tokenizer: Tokenizer, most: int | None) -> None:
    assert LengthBound(tokenizer).max_chars(10) == most


def test_tokens_that_strip_take_spaces_for_nothing() -> None:
    tokenizer = bpe(vocab=ALPHABET, pre=BYTES)
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])
    text = "<end>" + " " * 1000 + "a"
    assert len(tokenizer.encode(text).ids) == 2
    assert LengthBound(tokenizer).min_chars(text) == 6
