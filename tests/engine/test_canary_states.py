"""Canary checks of models with recurrent layers: received K/V and states are recomputed and compared."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.engine import scheduler
from kvferry.engine.canary_state import CHECK_ROWS
from kvferry.engine.events import BlocksChanged, CanaryChecked
from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.state_checkpoints import StateCheckpoints
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.ops import select
from kvferry.model_files.source import resolve
from tests.engine.test_canary import BLOCK, CPU, PROMPT, Pair, load
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("lfm2", "qwen3.5", "granite4", "falcon-h1", "jamba", "minimax")
"""A family of each kind of recurrent layer."""


def tiny(name: str, path: Path) -> Path:
    save_tiny(HYBRIDS[name](), path)
    return path


def checkpoints_of(pair: Pair) -> StateCheckpoints:
    assert isinstance(pair.decode.states, StateCheckpoints)
    return pair.decode.states


FORMATS = [(name, torch.float32) for name in KINDS] + [(name, torch.bfloat16) for name in KINDS[:-1]]


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_nodes_that_compute_alike_agree(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With other kernels in other batches, too; for prompts that fill their blocks and such that do not.

    Random experts are nearly as likely as each other, so roundings to bfloat16 choose others: MiniMax is left out."""
    path = tiny(name, tmp_path)
    pair = Pair(load(path, dtype), load(path, dtype, "cpu"))
    for seed, length in enumerate((1, 2, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 43, 90)):
        found = pair.looks(random.Random(seed).choices(range(VOCAB), k=length))
        assert (found.outcome, found.tokens) == ("agreed", length)
        assert found.distance <= found.tolerated / 2, f"near a false alarm with {length} tokens"
    assert pair.decode.pool.available == pair.decode.pool.num_blocks


def test_batch_invariant_nodes_agree_to_the_bit(tmp_path: Path) -> None:
    """So nothing need be tolerated, of states neither."""
    config = HYBRIDS["qwen3.5"]()
    config.head_dim = 32
    save_tiny(config, tmp_path)
    ops = select("cpu", CPU, batch_invariant=True)
    models = [load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.bfloat16, ops=ops) for _ in range(2)]
    pair = Pair(*models)
    pair.canary._tolerated = 0.0
    for length in (1, BLOCK, 43, 90):
        found = pair.looks(random.Random(length).choices(range(VOCAB), k=length))
        assert (found.outcome, found.distance) == ("agreed", 0.0)


def spoiled(pair: Pair, tokens: list[int]) -> CanaryChecked:
    """Ship them with a state of which one number in a hundred is wrong, and check."""
    pair.decode.events.clear()
    job, reserved = pair.reserve(tokens)
    of_state = reserved.block_ids[-checkpoints_of(pair).num_blocks :]

    def spoil(block: torch.Tensor) -> None:
        if any(block.data_ptr() == pair.runner.kv[each].data_ptr() for each in of_state):
            block.view(-1)[::100] += 3.0

    pair.spoil = spoil
    pair.land(job, reserved)
    pair.spoil = lambda block: None
    pair.finish()
    (found,) = pair.look()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_wrong_in_places_is_found_though_all_keys_and_values_are_right(
    name: str, tmp_path: Path
) -> None:
    path = tiny(name, tmp_path)
    pair = Pair(load(path), load(path))
    assert spoiled(pair, PROMPT).outcome == "differed"
    gone = [h for event in pair.decode.events if isinstance(event, BlocksChanged) for h in event.removed]
    assert gone
    assert pair.decode.pool.findable() == [], "neither its blocks nor checkpoints made behind them are found any more"
    assert pair.looks(PROMPT[::-1]).outcome == "agreed"


def decay(model: Model) -> None:
    """States are forgotten a little too fast in one layer."""
    for layer in model.parameters.layers:  # type: ignore[attr-defined]
        if layer.mixer is not None:
            layer.mixer.decay.mul_(1.5)
            return


@pytest.mark.parametrize("name", ["qwen3.5", "granite4", "jamba", "minimax"])
def test_a_node_whose_states_decay_otherwise_is_found(name: str, tmp_path: Path) -> None:
    path = tiny(name, tmp_path)
    prefill = load(path)
    decay(prefill)
    found = Pair(prefill, load(path)).looks(PROMPT)
    assert found.outcome == "differed"


def test_requests_have_the_rows_of_a_check_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ARRIVING", 1)  # all blocks may be promised at once
    path = tiny("lfm2", tmp_path)
    pair = Pair(load(path), load(path))
    rows = checkpoints_of(pair).row_pool
    taken = rows.take_up_to(rows.free - 2 * ROWS - CHECK_ROWS)
    pair.ship(PROMPT)
    pair.canary.yield_blocks()
    assert pair.canary
    job, _ = pair.reserve([1] * 20)
    pair.canary.yield_blocks()
    assert pair.canary, "both have rows"
    pair.decode.reserve("third", replace(job, request_id="third"))
    pair.canary.yield_blocks()
    assert not pair.canary
    assert [each.outcome for each in pair.decode.events if isinstance(each, CanaryChecked)] == ["dropped"]
    rows.release(taken)


def test_a_check_that_would_leave_too_few_rows_is_not_begun(tmp_path: Path) -> None:
    path = tiny("lfm2", tmp_path)
    pair = Pair(load(path), load(path))
    rows = checkpoints_of(pair).row_pool
    taken = rows.take_up_to(rows.free - ROWS - CHECK_ROWS + 1)
    pair.ship(PROMPT)
    assert not pair.canary
    rows.release(taken)
    pair.finish()
    pair.decode.check_integrity()
    assert [each.outcome for each in pair.decode.events if isinstance(each, CanaryChecked)] == ["dropped"]


def test_a_piece_that_is_abandoned_is_computed_again_from_the_same_state(tmp_path: Path) -> None:
    path = tiny("qwen3.5", tmp_path)
    pair = Pair(load(path), load(path))
    pair.ship(PROMPT)
    pair.finish()
    draw = random.Random(3)
    for _ in range(40):
        pair.clock.now += 1.01 * (pair.canary.pause_s() or 0.0)
        layers = iter(range(draw.randrange(3)))
        pair.canary.turn(lambda layers=layers: next(layers, None) is not None)  # type: ignore[misc]
    assert [found.outcome for found in pair.look()] == ["agreed"]
