"""States in blocks of the pool: whatever blocks hold one, in whatever order, it comes back as it was."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS

FLOATS = 70
"""Of a state: four blocks of 64 bytes and a part of one."""


@pytest.mark.parametrize("blocks", [(3, 4, 5, 6, 7), (7, 6, 5, 4, 3), (0, 1, 9, 4, 5), (8, 2, 3, 5, 1)])
def test_a_state_comes_back_from_any_blocks(blocks: tuple[int, ...]) -> None:
    kv = torch.full((10, 1, 2, 1, 4, 2), 7.0)
    states = StateMemory(make_rows(ROWS, FLOATS, kv.device), kv)
    assert states.num_blocks == len(blocks)
    wanted = torch.randn(FLOATS)
    states.rows[0] = wanted
    states.save(0, blocks)
    held = kv[list(blocks)].flatten()
    assert torch.equal(held[:FLOATS], wanted)
    assert not held[FLOATS:].any()
    assert kv[[each for each in range(10) if each not in blocks]].eq(7.0).all()
    states.load(blocks, 2)
    assert torch.equal(states.rows[2], wanted)
    assert not states.rows[1].any()
