"""A step that raises: the requests that make it raise are found, and fail alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated
from kvferry.engine.loop import EngineLoop
from kvferry.engine.models.base import KeepGoing, SuspendedPass
from kvferry.engine.step_slices import Slice
from kvferry.kernels.decoder_step import always
from kvferry.protocol.messages import Job
from kvferry.protocol.work import Embed
from tests.toy import VOCAB, ToyModel, expected, finish, make_engine, make_job, tokens_of
from tests.waiting import wait_for

POISON = VOCAB - 1
"""The token that the model below cannot compute."""
GOOD = [1, 2, 3]


class Spoiled:
    """An engine whose model raises for every batch with POISON in it. `ran` are the sizes of the batches it was
    given."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.ran = engine, list[int]()
        run = engine.runner.run

        def spoiled(
            slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None
        ) -> object:
            self.ran.append(len(slices))
            found = run(slices, keep_going, halfway)
            if any(POISON in part.request.token_ids for part in slices):
                raise RuntimeError("no kernel for it")
            return found

        monkeypatch.setattr(engine.runner, "run", spoiled)

    @property
    def failed(self) -> dict[str, str]:
        return {e.key[0]: e.error.code for e in self.engine.events if isinstance(e, Failed)}


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_the_one_request_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    engine = make_engine(num_blocks=128, budget=128, beside=128, seqs=32)
    spoiled = Spoiled(engine, monkeypatch)
    for i in range(count):
        engine.add(make_job(f"r{i}", [*GOOD, i]))
    engine.add(make_job("poison", [*GOOD, POISON]))
    finish(engine)
    assert spoiled.failed == {"poison": "step_failed"}
    for i in range(count):
        assert tokens_of(engine, f"r{i}") == expected([*GOOD, i], 8)
    assert len(spoiled.ran) <= 7 + 2 * (1 + math.ceil(math.log2(count + 1)))
    failure = next(e.error for e in engine.events if isinstance(e, Failed))
    assert (failure.retryable, "no kernel for it" in failure.message) == (True, True)


def test_several_that_raise_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(budget=64, beside=64)
    spoiled = Spoiled(engine, monkeypatch)
    for i in range(6):
        engine.add(make_job(f"r{i}", [*GOOD, POISON if i in (0, 3, 4) else i]))
    finish(engine)
    assert spoiled.failed == dict.fromkeys(("r0", "r3", "r4"), "step_failed")
    assert all(len(tokens_of(engine, f"r{i}")) == 8 for i in (1, 2, 5))


def test_what_a_moment_lacks_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    run, left = engine.runner.run, [1]

    def once(slices: Sequence[Slice], keep_going: KeepGoing = always, halfway: SuspendedPass | None = None) -> object:
        found = run(slices, keep_going, halfway)
        if left:
            left.pop()
            raise torch.OutOfMemoryError("a moment")
        return found

    monkeypatch.setattr(engine.runner, "run", once)
    engine.add(make_job("a", GOOD))
    finish(engine)
    assert tokens_of(engine, "a") == expected(GOOD, 8)


def test_what_a_failed_try_added_to_a_request_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the prompt and the sum of a mean would count twice."""
    vectors, scores = [], []
    for spoil in (False, True):
        engine = make_engine(budget=64, beside=64)
        spoiled = Spoiled(engine, monkeypatch)
        engine.add(make_job("scored", GOOD, max_tokens=1, prompt_logprobs=1))
        engine.add(Job("read", 0, tuple(GOOD), len(GOOD), Embed("mean", normalize=False), "router"))
        if spoil:
            engine.add(make_job("poison", [POISON]))
        finish(engine)
        assert spoiled.failed == ({"poison": "step_failed"} if spoil else {})
        made = {e.key[0]: e.delta for e in engine.events if isinstance(e, Generated)}
        vectors.append(made["read"].vector)
        scores.append(made["scored"].prompt_logprobs)
    assert vectors[0] == vectors[1]
    assert scores[0] == scores[1]
    assert len(scores[0] or ()) == len(GOOD)


def test_what_cannot_be_committed_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    register = engine.pool.register

    def broken(*of: object) -> int:
        monkeypatch.setattr(engine.pool, "register", register)
        raise RuntimeError("injected")

    engine.add(make_job("a", [*GOOD, 4, 5]))
    engine.add(make_job("b", [*GOOD, 6, 7]))
    monkeypatch.setattr(engine.pool, "register", broken)
    finish(engine)
    failed = [(e.key[0], e.error.code) for e in engine.events if isinstance(e, Failed)]
    assert failed == [("a", "step_failed")]
    assert tokens_of(engine, "b") == expected([*GOOD, 6, 7], 8)


def test_a_device_that_is_gone_ends_the_node() -> None:
    class Gone(ToyModel):
        device = torch.device("meta")  # on which no sum has a value

        def forward(self, *_: object) -> torch.Tensor:
            raise RuntimeError("CUDA error: unspecified launch failure")

    engine, faults = make_engine(), list[str]()
    loop = EngineLoop(engine, lambda events: None, on_fault=faults.append)
    engine.runner.model = Gone()
    loop.start()
    loop.submit(lambda engine: engine.add(make_job("a", GOOD)))
    wait_for(lambda: faults != [])
    loop.stop()
    assert "the device meta is lost" in faults[0]
    assert loop.fault == faults[0]
