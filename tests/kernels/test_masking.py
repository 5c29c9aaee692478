"""Bit masks on logits: only what is set stays, in the rows that have one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import masking


@pytest.mark.parametrize("vocab", [40, 64, 1000])
@pytest.mark.parametrize("form", ["cpu", "elsewhere"])
def test_what_is_not_in_the_mask_becomes_minus_infinity(vocab: int, form: str) -> None:
    chance = np.random.default_rng(vocab)
    logits = torch.from_numpy(chance.normal(size=(4, vocab)).astype(np.float32))
    logits[1, 3] = torch.nan
    allowed = chance.random((2, vocab)) < 0.3
    allowed[0, 3] = False
    padded = np.zeros((2, (vocab + 31) // 32 * 32), dtype=bool)
    padded[:, :vocab] = allowed
    padded[:, vocab:] = True
    masks = list(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    before = logits.clone()
    if form == "cpu":
        masking.keep_only(logits, [1, 3], masks)
    else:
        masking.on_device(logits, [1, 3], masks)
    for row, some in ((1, allowed[0]), (3, allowed[1])):
        assert torch.equal(logits[row][some], before[row][some])
        assert (logits[row][~some] == -torch.inf).all()
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_all_rows_at_once_elsewhere() -> None:
    logits = torch.zeros(2, 64)
    masking.on_device(logits, [0, 1], [np.array([1, 0], dtype=np.int32), np.array([0, -(2**31)], dtype=np.int32)])
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[0], [63]]
