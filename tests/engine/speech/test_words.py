"""Words and their times."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvferry.engine.speech.words import _aligned, split_words, timed, word_times


def test_the_alignment_is_the_cheapest(parts: object) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for seed in range(8):
        costs = np.random.default_rng(seed).normal(size=(5 + seed, 40))
        ours, theirs = _aligned(costs), _dynamic_time_warping(costs)
        assert costs[ours].sum() == pytest.approx(costs[tuple(theirs)].sum())
        for path in ours:
            assert set(np.diff(path)) <= {0, 1}, "it goes forward"


def test_words_are_where_attention_is() -> None:
    """Three tokens of two words, which the heads hear at steps 10 to 19, 20 to 39 and 40 to 59."""
    scores = torch.full((2, 6, 80), -4.0)
    bounds = [(0, 10), (0, 10), (10, 20), (20, 40), (40, 60), (60, 80)]
    for token, (begin, end) in enumerate(bounds):
        scores[:, token, begin:end] = 4.0
    times = word_times(scores, 1, [1, 2], 80)
    assert times[0] == pytest.approx((0.0, 0.2), abs=0.05)
    assert times[1] == pytest.approx((0.2, 0.8), abs=0.05)


def test_punctuation_and_parts_belong_to_their_word() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode(" Grüße, Anna.").ids
    words = split_words(tokenizer, ids, "de")
    assert [word for word, _ in words] == [" Grüße,", " Anna."]
    assert sum(count for _, count in words) == len(ids)
    assert [word for word, _ in split_words(tokenizer, tokenizer.encode("日本。").ids, "ja")] == ["日", "本。"]
    assert timed(words[:1], [(0.5, 0.75)], 10.0)[0].word == "Grüße,"
