"""Kept plans equal plans made anew, whatever happens to the batch between two steps."""

from __future__ import annotations

import random

import pytest
import torch

from kvferry.engine.batch_planner import BatchPlanner, build_plan
from kvferry.engine.decode_batch import SPARE_BLOCKS
from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from tests.toy import VOCAB, expected, make_engine, make_job


def assert_same(kept: BatchPlan, fresh: BatchPlan) -> None:
    width = fresh.block_table.shape[1]
    assert torch.equal(kept.block_table[:, :width], fresh.block_table)
    assert not kept.block_table[:, width:].any()
    for name in ("positions", "slots", "query_start", "total_len"):
        one, other = getattr(kept, name), getattr(fresh, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    for name in ("query_lens", "total_lens", "num_decodes", "block_size"):
        assert getattr(kept, name) == getattr(fresh, name), name


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compares every plan of the test's engines with one made anew; the sizes of the batches."""
    sizes: list[int] = []
    original = BatchPlanner.plan

    def plan(planner: BatchPlanner, slices: list[Slice]) -> tuple[torch.Tensor, BatchPlan]:
        token_ids, made = original(planner, slices)
        fresh_ids, fresh = build_plan(slices, made.block_size, Staging(torch.device("cpu")))
        assert_same(made, fresh)
        assert torch.equal(token_ids, fresh_ids)
        assert token_ids.tolist() == [token for s in slices for token in s.request.token_ids[s.start :][: s.count]]
        sizes.append(len(slices))
        return token_ids, made

    monkeypatch.setattr(BatchPlanner, "plan", plan)
    return sizes


@pytest.mark.parametrize("seed", range(5))
def test_streams_that_come_go_grow_and_are_preempted(checked: list[int], seed: int) -> None:
    chance = random.Random(seed)
    engine = make_engine(num_blocks=24)
    jobs = [
        make_job(f"r{i}", chance.choices(range(VOCAB), k=chance.randint(1, 20)), max_tokens=chance.randint(1, 60))
        for i in range(12)
    ]
    while jobs or engine.has_work():
        if jobs and chance.random() < 0.2:
            engine.add(jobs.pop())
        if chance.random() < 0.03:
            engine.cancel(f"r{chance.randrange(12)}", 0)
        engine.step()
    assert engine.scheduler.preempted_total
    assert max(checked) > 2
    engine.check_integrity()


def test_a_full_block_that_is_exchanged_for_an_equal_one(checked: list[int]) -> None:
    engine = make_engine(budget=64)
    prompt = [1, 2, 3]  # no full block, for which the second would wait
    for name in "ab":
        engine.add(make_job(name, prompt, max_tokens=20))
    requests = list(engine.request_table.waiting)
    while engine.has_work():
        engine.step()
    assert all(r.token_ids == [*prompt, *expected(prompt, 20)] for r in requests)
    assert set(checked) == {2}


def test_steps_of_the_same_batch_share_their_arrays_until_the_table_is_full() -> None:
    request = Request(make_job("a", [1] * 4 * (SPARE_BLOCKS + 2)), b"", 4)
    request.block_ids = [3]
    planner, tables = BatchPlanner(4, Staging(torch.device("cpu"))), set()
    for start in range(4 * (SPARE_BLOCKS + 2)):
        request.block_ids = list(range(3, 4 + start // 4))
        _, plan = planner.plan([Slice(request, start, 1)])
        tables.add(plan.block_table.data_ptr())
    assert len(tables) == 2
