"""A GPU's pool is what remains of its memory beside the weights and the largest step, as a stand-in device measures."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvferry.engine.budget import Limits
from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.ranks.calls import Logits, packed
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.rank_channel import RankChannel
from kvferry.worker import memory_profile, rank
from kvferry.worker.engine_factory import assemble
from kvferry.worker.largest_step import LargestStep, largest_steps
from kvferry.worker.memory_profile import MemoryProfile, MemoryProfiler, start_profiler
from kvferry.worker.pool_memory import GIB, pool_blocks
from kvferry.worker.ranks import PROFILED
from tests.recurrent_toy import RecurrentToy
from tests.toy import ToyModel
from tests.worker.test_draft_factory import save

CPU = torch.device("cpu")
MIB = 1 << 20


class Memory:
    """A device of 1 GiB on which everything but the peak is as the test says."""

    def __init__(self, *free: int, total: int = GIB, peak: int = 0, fault: Exception | None = None) -> None:
        self.total, self._free, self._peak, self._fault, self.ran = total, list(free), peak, fault, 0

    def free(self) -> int:
        return self._free.pop(0) if len(self._free) > 1 else self._free[0]

    def peak_of(self, run: Callable[[], object]) -> int:
        if self._fault is not None:
            raise self._fault
        run()
        self.ran += 1
        return self._peak


class Watched(ToyModel):
    """A toy that keeps the plans of its passes and the rows of its logits."""

    def __init__(self) -> None:
        self.plans: list[BatchPlan] = []
        self.rows: list[int] = []

    def forward(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, *args: Any) -> torch.Tensor:
        assert len(kv) == 1
        self.plans.append(plan)
        return super().forward(token_ids, kv, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return super().logits(hidden)


def step(model: ToyModel, tokens: int, rows: int) -> LargestStep:
    return LargestStep(model, model.info.layout(torch.float32, 4), tokens, rows)


def test_the_share_is_of_the_whole_device_and_weights_and_the_step_come_out_of_it() -> None:
    profile = MemoryProfile(1000, 950, 700, 50, 30, 0.9)
    assert profile.room == 900 - 250 - 50 - 30
    shared = MemoryProfile(1000, 450, 400, 50, 30, 0.45)  # beside another process with the same share
    assert shared.room == 380 - 50 - 30
    assert MemoryProfile(1000, 950, 100, 50, 30, 0.9).room < 0


def test_the_largest_step_computes_all_tokens_and_draws_all_rows() -> None:
    model = Watched()
    step(model, 1300, 9).run()
    (plan,) = model.plans
    assert (plan.query_lens, plan.num_decodes) == ((276, 512, 512), 0)
    assert model.rows == [9]
    assert len(set(plan.slots.tolist())) == 4


def test_a_remaining_token_comes_first_and_no_step_is_of_decodes_alone() -> None:
    model = Watched()
    step(model, 513, 4).run()
    assert model.plans[0].query_lens == (1, 512)


def test_recurrent_layers_get_a_row_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = RecurrentToy(), list[BatchPlan]()
    monkeypatch.setattr(model, "faults", passes.append)
    step(model, 600, 2).run()
    states = passes[0].states
    assert states is not None
    assert states.rows.shape == (2, model.info.state_floats)


def test_steps_follow_the_limits() -> None:
    layout = ToyModel.info.layout(torch.float32, 4)
    given = WorkerSettings(max_num_seqs=64, num_speculative_tokens=3)
    limits = Limits(512, 256, 64)
    target, draft = largest_steps(given, limits, (ToyModel(), layout), (ToyModel(), layout), [])
    assert (target.tokens, target.rows, draft.tokens) == (512, 4 * 66, 128)
    assert len(largest_steps(given, limits, (ToyModel(), layout), (None, None), [])) == 1
    assert target.graph_bytes() > sum((1, 2, 4, *range(8, 129, 8))) * 101 * 4


def test_a_given_size_and_a_cpu_need_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_profiler(WorkerSettings(), CPU) is None
    monkeypatch.setattr(memory_profile, "memory_of", lambda device: Memory(GIB))
    assert start_profiler(WorkerSettings(kv_cache_gib=1.0), CPU) is None
    assert start_profiler(WorkerSettings(kv_blocks=9), CPU) is None
    assert start_profiler(WorkerSettings(), CPU) is not None


@pytest.mark.parametrize("lost", [False, True], ids=["alone", "among ranks"])
def test_a_step_that_does_not_fit_names_the_flags(lost: bool) -> None:
    fault: Exception = torch.OutOfMemoryError("out")
    if lost:
        cause, fault = fault, DeviceLost("the ranks can no longer compute")
        fault.__cause__ = cause
    with pytest.raises(ConfigError, match="--max-num-batched-tokens or --max-num-seqs"):
        MemoryProfiler(Memory(GIB, fault=fault), 0.9).room(lambda: None)


def test_other_failures_are_not_taken_for_memory() -> None:
    with pytest.raises(DeviceLost):
        MemoryProfiler(Memory(GIB, fault=DeviceLost("gone")), 0.9).room(lambda: None)


def test_no_room_names_the_flags_and_shows_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"0\.88 GiB.*--gpu-memory-utilization 0\.9; raise") as raised:
        MemoryProfiler(Memory(GIB, 100 * MIB, peak=900 * MIB), 0.9).room(lambda: None)
    assert raised.value.param == "gpu_memory_utilization"


def test_a_measured_pool_takes_all_that_is_left() -> None:
    gpu = torch.device("cuda")
    assert pool_blocks(WorkerSettings(), 10, gpu, 1000, measured=True) == 100
    assert pool_blocks(WorkerSettings(), 10, gpu, 1000) == 80
    with pytest.raises(ConfigError):
        pool_blocks(WorkerSettings(), 10, gpu, 15, measured=True)


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "with a draft model"])
@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])
def test_a_node_measures_before_it_makes_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, draft: bool, recurrent: bool
) -> None:
    """On the CPU, which is said to be a device of 64 MiB of which the weights took 4 and the step takes 8."""
    memory = Memory(60 * MIB, 56 * MIB, total=64 * MIB, peak=8 * MIB)
    monkeypatch.setattr(memory_profile, "memory_of", lambda device: memory)
    caplog.set_level("INFO", "kvferry.worker")
    given: dict[str, Any] = {"speculative_model": save(tmp_path / "small", 2)} if draft else {}
    settings = WorkerSettings(
        model=save(tmp_path / "model", 4, recurrent=recurrent), device="cpu", dtype="float32", kernels="reference",
        role="decode", enforce_eager=True, num_speculative_tokens=3, gpu_memory_utilization=0.75, **given,
    )  # fmt: skip
    parts = assemble(settings)
    pool = len(parts.kv) * parts.layout.block_bytes
    room = 48 * MIB - 4 * MIB - 8 * MIB
    states = parts.engine.runner.states
    beside = 0 if parts.engine.draft_model is None else parts.engine.draft_model.runner.kv.nbytes
    used = pool + beside + (0 if states is None else states.rows.nbytes)
    assert memory.ran == 1
    assert room - 2 * parts.layout.block_bytes < used <= room
    assert "the largest step takes 0.01 GiB" in caplog.text


class _Apart:
    """A group of two of which this is the second."""

    apart, rank, ranks = True, 1, 2


def test_another_rank_computes_the_step_and_answers_what_remains() -> None:
    computed = list[int]()
    decoder = SimpleNamespace(device=CPU, config=None, logits=lambda hidden: computed.append(len(hidden)))
    part = RankWorker(cast(Decoder, decoder), cast(Any, _Apart()))
    ours, theirs = Pipe()
    line, found = RankChannel(os.dup(theirs.fileno())), list[tuple[str, int]]()
    memory = Memory(1000, 800, total=1000, peak=100)
    profiler = MemoryProfiler(memory, 0.9)
    thread = threading.Thread(target=lambda: found.append(rank.profile(part, line, profiler)))
    thread.start()
    ours.send_bytes(pickle.dumps((KVLayout(2, 2, 8, "float32", 4), 1)))
    ours.send_bytes(packed(Logits(torch.zeros(3, 8))))
    ours.send_bytes(PROFILED)
    thread.join(10)
    assert computed == [3]
    assert found == [("", 900 - 200 - 100)]
