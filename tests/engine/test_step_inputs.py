"""The small inputs of a step: one copy brings them, and what it brings is what was given."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvferry.engine import runner
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.token_readback import Readback
from tests.toy import VOCAB, expected, make_engine, make_job, tokens_of

CPU = torch.device("cpu")


def test_arrays_arrive_whole_in_one_buffer() -> None:
    staging = Staging(CPU, direct=False)
    arrays: list[np.ndarray] = [
        np.arange(3),
        np.zeros(0, np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.array([0.5], np.float32),
    ]
    first = staging.put(arrays)
    for array, tensor in zip(arrays, first, strict=True):
        assert (tuple(tensor.shape), str(tensor.dtype)) == (array.shape, f"torch.{array.dtype}")
        assert np.array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in first}) == 1
    again = staging.put(arrays)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in first]


def test_it_grows_for_a_batch_that_is_larger() -> None:
    staging = Staging(CPU, direct=False)
    staging.put([np.arange(4)])
    large = np.arange(100_000)
    assert np.array_equal(staging.put([large])[0].numpy(), large)
    assert staging.put([np.arange(4)])[0].tolist() == [0, 1, 2, 3]


def test_a_cpu_is_given_the_arrays_themselves() -> None:
    array = np.arange(4)
    (tensor,) = Staging(CPU).put([array])
    array[0] = 9
    assert tensor[0] == 9


class Copied:
    """A copy that a buffer is read by; how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_a_buffer_is_filled_again_only_after_the_copy_that_was_made_of_it() -> None:
    """Which is not the last one: that may stand behind a step that runs."""
    staging = Staging(CPU, direct=False)
    copies = Copied(), Copied()
    for host, copied in zip(staging._hosts, copies, strict=True):
        host.copied = copied  # type: ignore[assignment]
    waits = []
    for _ in range(4):
        staging.put([np.arange(4)])
        waits.append(tuple(copied.waits for copied in copies))
    assert waits == [(1, 0), (1, 1), (2, 1), (2, 2)]
    assert staging._hosts[0].bytes.data_ptr() != staging._hosts[1].bytes.data_ptr()


def test_what_is_read_back_is_what_was_drawn() -> None:
    readback = Readback(torch.tensor([3, 1, 2]))
    assert readback.wait() == [3, 1, 2]
    assert readback.values.tolist() == [3, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device that computes beside its host")
def test_what_is_read_back_waits_for_nothing_behind_it() -> None:
    readback, later = Readback(torch.tensor([3, 1, 2], device="cuda")), torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000_000)
    later.record()
    assert readback.wait() == [3, 1, 2]
    assert not later.query()
    torch.cuda.synchronize()


class Counted(Staging):
    """As for a GPU; how many copies all of them made."""

    copies = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, direct=False)

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        Counted.copies += 1
        return super().put(arrays)


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_makes_one_copy_a_step_and_draws_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(runner, "Staging", Counted)
    chance = random.Random(seed)
    engine = make_engine(num_blocks=60)
    prompts = [chance.choices(range(VOCAB), k=chance.randint(1, 40)) for _ in range(8)]
    jobs = [make_job(f"r{i}", prompt, max_tokens=chance.randint(1, 12)) for i, prompt in enumerate(prompts)]
    steps = 0
    while jobs or engine.has_work():
        if jobs and chance.random() < 0.4:
            engine.add(jobs.pop())
        before = Counted.copies
        engine.step()
        assert Counted.copies - before <= 1
        steps += Counted.copies > before
    assert steps > 10
    for i, prompt in enumerate(prompts):
        tokens = tokens_of(engine, f"r{i}")
        assert tokens
        assert tokens == expected(prompt, len(tokens))
