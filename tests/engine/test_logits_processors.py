"""Edits kept per request: the same tokens as made anew, at the cost of what is new."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine
from kvferry.engine.events import Computed, Generated, Reserved
from kvferry.engine.sampler import SampleRow, sample
from kvferry.kernels.logit_adjustments import Tally
from kvferry.kernels.reference import ReferenceOps
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.toy import VOCAB, make_engine, make_job, runner_of

PENALISED = SamplingParams(
    max_tokens=24, temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
)
tokens = st.lists(st.integers(0, 9), max_size=20)


@given(tokens, st.integers(0, 20), st.lists(tokens, max_size=6))
@settings(deadline=None)
def test_a_tally_follows_its_list(first: list[int], start: int, more: list[list[int]]) -> None:
    kept = list(first)
    tally = Tally(kept, min(start, len(kept)), torch.device("cpu"))
    for chunk in more:
        kept += chunk
        ids, counts = tally.follow()
        counted = kept[min(start, len(first)) :]
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: counted.count(t) for t in counted}


class Watched(list[int]):
    """Counts how many of its items are read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_a_step_reads_the_new_tokens_only() -> None:
    context = Watched(random.Random(0).choices(range(500), k=5000))
    row = SampleRow(replace(PENALISED, min_tokens=5, eos_token_ids=(3,)), context, 4000)
    sample(torch.zeros(1, 500), [row], ReferenceOps())
    context.read = 0
    for _ in range(10):
        context.append(sample(torch.zeros(1, 500), [row], ReferenceOps())[0].token_id)
    assert context.read <= 40


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_kept_row_draws_what_a_new_one_draws(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kept = SampleRow(replace(PENALISED, seed=seed), [1, 2, 3, 2], 4)
    for _ in range(100):
        logits = torch.randn(1, 40, generator=generator) * 2
        new = SampleRow(kept.params, list(kept.token_ids), 4)
        assert sample(logits.clone(), [kept], ReferenceOps()) == sample(logits.clone(), [new], ReferenceOps())
        kept.token_ids.append(sample(logits, [new], ReferenceOps())[0].token_id)  # type: ignore[attr-defined]


def job(name: str, tokens: list[int], attempt: int = 0) -> Job:
    return replace(make_job(name, tokens, attempt=attempt), work=Generate(PENALISED))


def made(engine: Engine, name: str) -> list[int]:
    return [t for e in engine.events if isinstance(e, Generated) and e.key[0] == name for t in e.delta.token_ids]


def finish(engine: Engine) -> None:
    while engine.has_work():
        assert engine.step()


@pytest.fixture
def alone() -> dict[str, list[int]]:
    """What each request draws with the engine to itself."""
    found = {}
    for name, tokens in PROMPTS.items():
        engine = make_engine()
        engine.add(job(name, tokens))
        finish(engine)
        found[name] = made(engine, name)
    return found


PROMPTS = {f"r{i}": random.Random(i).choices(range(VOCAB), k=10) for i in range(4)}


def test_penalties_count_the_same_after_preemption(alone: dict[str, list[int]]) -> None:
    engine = make_engine(num_blocks=14, budget=64, beside=64)
    for name, tokens in PROMPTS.items():
        engine.add(job(name, tokens))
    finish(engine)
    assert engine.scheduler.preempted_total > 0
    assert {name: made(engine, name) for name in PROMPTS} == alone


def test_penalties_count_the_same_on_another_node(alone: dict[str, list[int]]) -> None:
    prefill, decode = make_engine(), make_engine()
    shipped, tokens = job("r0", PROMPTS["r0"]), alone["r0"]
    decode.reserve("g", shipped)
    decode.step()
    prefill.add(shipped, transfer=1, prefill_only=True)
    finish(prefill)
    grant = next(e for e in decode.events if isinstance(e, Reserved))
    sent = [b for e in prefill.events if isinstance(e, Computed) for b in e.blocks]
    for (_, source), target in zip(sent, grant.block_ids, strict=True):
        runner_of(decode).kv[target].copy_(runner_of(prefill).kv[source])
    decode.start("g", next(e.delta for e in prefill.events if isinstance(e, Generated)))
    finish(decode)
    assert made(prefill, "r0") + made(decode, "r0") == tokens
    resumed = make_engine()
    resumed.add(replace(job("r0", [*PROMPTS["r0"], *tokens[:7]], 1), prompt_len=len(PROMPTS["r0"])))
    finish(resumed)
    assert made(resumed, "r0") == tokens[7:]
