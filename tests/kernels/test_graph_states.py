"""Recorded decode steps of a recurrent model: each replay reads and writes the rows of its own batch, and padding rows
touch none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cuda_graphs import GraphStep
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.decoder_step import always
from kvferry.kernels.sequence_state import SequenceStates

KV = torch.zeros(4, 1)


def replayed(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A capture on a CPU: a replay runs everything again, into the memory of the first run."""
    out = run()

    def replay() -> None:
        for kept, made in zip(out, run(), strict=True):
            kept.copy_(made)

    return replay, out


def layers(
    token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, wanted: Callable[[], bool] = always
) -> torch.Tensor:
    """Each token's result is the sum of the tokens that its state has seen, and its own."""
    assert plan.states is not None
    rows, before, after = plan.states.rows, plan.states.before, plan.states.after
    found = torch.where(before[:, None] >= 0, rows[before.clamp(min=0)], 0.0) + token_ids[:, None]
    rows[after[after >= 0]] = found[after >= 0]
    return found


def step_of() -> GraphStep:
    form = SimpleNamespace(cos=torch.zeros(64, 1), logits=lambda hidden: hidden)
    return GraphStep(cast(DecoderForm, form), layers, replayed)


def plan(states: SequenceStates) -> BatchPlan:
    count = len(states.before)
    ones = torch.ones(count, dtype=torch.int64)
    return BatchPlan(
        ones, ones, torch.zeros(count, 1, dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32), ones.int(),
        (1,) * count, (1,) * count, count, 16, states=states,
    )  # fmt: skip


@pytest.mark.parametrize("again", [False, True])
def test_batches_of_any_size_alternate_their_rows(again: bool) -> None:
    rows, step, seen = torch.full((12, 1), 1e4), step_of(), [0.0] * 6
    where = [-1] * 6
    for number, batch in enumerate([[0, 1, 2], [2], [1, 0, 3], [5, 4, 3, 2, 1, 0], [3, 5], [0]]):
        if again and number == 3:
            rows = rows.clone()
        after = [2 * i + (where[i] == 2 * i) for i in batch]
        states = SequenceStates(rows, torch.tensor([where[i] for i in batch]), torch.tensor(after))
        untouched = rows.clone()
        tokens = torch.tensor([10 * number + i for i in batch])
        found = step.logits(tokens, KV, plan(states)).values
        for place, i in enumerate(batch):
            seen[i] += float(tokens[place])
            where[i] = after[place]
        assert found[:, 0].tolist() == [seen[i] for i in batch]
        untouched[after] = rows[after]
        assert torch.equal(untouched, rows), "rows of others"
