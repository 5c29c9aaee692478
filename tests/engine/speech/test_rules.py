"""Tokens that may be drawn are those that transformers' processors allow."""

from __future__ import annotations

import random

import torch

from kvferry.engine.speech.rules import DecodingRules
from kvferry.speech_worker.assembly import SpeechParts
from tests.engine.speech.transformers_rules import processed


def test_the_same_tokens_are_allowed_as_by_transformers(parts: SpeechParts) -> None:
    config = parts.model.config
    rules, draw = DecodingRules(config, torch.device("cpu")), random.Random(3)
    first, last = config.tokens.timestamps, config.vocab_size - 1
    for case in range(200):
        written: list[int] = []
        for _ in range(case % 7):
            time = written[-1] if written and written[-1] >= first else draw.randint(first, last)
            written.append(draw.choice((draw.randrange(200), time)))
        logits = torch.randn(1, config.vocab_size, generator=torch.Generator().manual_seed(case))
        if case % 3 == 0:
            logits[:, first:] += 4  # times outweigh every text
        expected, found = processed(config, written, logits), logits.clone()
        rules.apply(found, [written])
        assert torch.equal(found == float("-inf"), expected == float("-inf")), written
