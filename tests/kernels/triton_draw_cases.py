"""Tokens drawn by the Triton kernel equal those of the reference. Collected by test_triton_steps.py; on a GPU the
kernel runs for real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvferry.kernels.sampling import NO_TOKEN, NoiseKeys, draw
from kvferry.kernels.triton import TritonOps
from kvferry.protocol.sampling import SamplingParams
from tests.kernels.interpreted import DEVICE

VOCAB = 500
OPS = TritonOps(4)
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.9},
    "hot": {"temperature": 3.0},
    "min_p": {"temperature": 1.0, "min_p": 0.08},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.2, "top_p": 0.6},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    "one": {"temperature": 1.0, "top_k": 1},
    "narrow": {"temperature": 1.0, "top_p": 1e-6},
}


def logits_of(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """With ties: values lie on a grid."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 8).round() / 4


def compare(logits: torch.Tensor, params: list[SamplingParams], masks: list[np.ndarray | None] | None = None) -> None:
    keys = NoiseKeys(tuple(range(7, 7 + len(params))), tuple(range(100, 100 + 3 * len(params), 3)))
    got = OPS.draw(logits.to(DEVICE, copy=True), params, keys, masks or ())
    assert got.tolist() == draw(logits.clone(), params, keys, masks or ()).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_each_form_draws_as_the_reference(form: str) -> None:
    compare(logits_of(4, 1), [SamplingParams(**FORMS[form])] * 4)


def test_rows_of_all_forms_in_one_launch_with_masks() -> None:
    params = [SamplingParams(**form) for form in FORMS.values()]
    random = np.random.default_rng(2)
    words = -(-VOCAB // 32)
    masks = [
        random.integers(-(2**31), 2**31, words, dtype=np.int64).astype(np.int32) if i % 2 else None
        for i in range(len(params))
    ]
    compare(logits_of(len(params), 3), params, masks)


def test_a_vocabulary_of_several_tiles() -> None:
    compare(logits_of(2, 4, 5000), [SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)])


SEVERAL_TILES = 9001
WIDE = {
    **FORMS,
    "more than a tile's lanes": {"temperature": 1.0, "top_k": 5000},
    "nearly all": {"temperature": 2.0, "top_p": 0.999},
    "both": {"temperature": 1.0, "top_k": 4096, "top_p": 0.5},
}


@pytest.mark.parametrize("form", WIDE)
def test_each_form_over_several_tiles(form: str) -> None:
    """Of usual values; of flat ones; and of values whose largest lie in one lane, behind each other."""
    logits = logits_of(4, 6, SEVERAL_TILES)
    logits[1] = logits[1] / 64
    logits[2] = logits[2] / 64
    logits[2, 17::4096] = torch.tensor([9.0, 7.0, 8.0])
    logits[3, 17::4096] = torch.tensor([9.0, 11.0, 10.0])
    compare(logits, [SamplingParams(**WIDE[form])] * 4)


def test_masks_over_several_tiles() -> None:
    words = -(-SEVERAL_TILES // 32)
    bits = np.random.default_rng(5).integers(-(2**31), 2**31, (len(WIDE), words), dtype=np.int64).astype(np.int32)
    params = [SamplingParams(**form) for form in WIDE.values()]
    compare(logits_of(len(WIDE), 7, SEVERAL_TILES), params, [*bits])


def test_what_is_no_number_draws_nothing() -> None:
    logits = logits_of(5, 5)
    logits[0, 3], logits[1, 3], logits[3, 3] = torch.nan, torch.inf, torch.nan
    logits[2] = -torch.inf
    allowed = np.full(-(-VOCAB // 32), -1, dtype=np.int32)
    allowed[0] = ~8
    params = [SamplingParams(temperature=1.0)] * 5
    masks = [None, None, None, allowed, None]
    compare(logits, params, masks)
    keys = NoiseKeys((1,) * 5, (1,) * 5)
    assert OPS.draw(logits.to(DEVICE, copy=True), params, keys, masks).tolist()[:3] == [NO_TOKEN] * 3
    assert (
        OPS.draw(logits.to(DEVICE, copy=True), [SamplingParams(temperature=0.0)] * 5, keys, masks).tolist()[3]
        != NO_TOKEN
    )


def test_no_rows() -> None:
    assert OPS.draw(torch.empty(0, VOCAB, device=DEVICE), [], NoiseKeys((), ())).tolist() == []


def test_rare_tokens_are_drawn_where_the_reference_draws_them() -> None:
    """Many draws from a flat distribution: noise alone decides."""
    compare(torch.zeros(24, VOCAB), [SamplingParams(temperature=1.0)] * 24)
