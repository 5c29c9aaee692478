"""Recurrent states through an engine's steps: any chunking, preemption, faults, suspension and cancellation give the
tokens of one uninterrupted run, and no row is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from kvferry.engine import suspended_steps
from kvferry.engine.events import Failed
from kvferry.kernels.batch_plan import BatchPlan
from tests.recurrent_toy import make_recurrent, toy_of
from tests.toy import VOCAB, expected, finish, make_job, tokens_of


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 33, 60, 64])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_any_chunking_gives_the_same_tokens(length: int, budget: int) -> None:
    engine = make_recurrent(budget=budget, beside=budget, seqs=1)
    engine.add(make_job("a", prompt(length), 12))
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(length), 12)


def test_streams_beside_prompts_and_each_other() -> None:
    engine = make_recurrent(num_blocks=200)
    for number in range(8):
        engine.add(make_job(str(number), prompt(5 + 7 * number, number), 20))
        engine.step()
    finish(engine)
    for number in range(8):
        assert tokens_of(engine, str(number)) == expected(prompt(5 + 7 * number, number), 20)


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_stream_is_recomputed_from_a_state(caching: bool) -> None:
    engine = make_recurrent(num_blocks=24, caching=caching)
    for number in range(4):
        engine.add(make_job(str(number), prompt(9, number), 24))
    finish(engine)
    assert engine.scheduler.preempted_total
    for number in range(4):
        assert tokens_of(engine, str(number)) == expected(prompt(9, number), 24)


def test_a_request_waits_for_rows_as_it_waits_for_blocks() -> None:
    engine = make_recurrent(rows=2)
    for number in range(5):
        engine.add(make_job(str(number), prompt(9, number), 6))
    engine.step()
    assert [len(engine.request_table.running), len(engine.request_table.waiting)] == [2, 3]
    finish(engine)
    for number in range(5):
        assert tokens_of(engine, str(number)) == expected(prompt(9, number), 6)


def test_a_step_that_raises_in_its_middle_is_computed_again_from_the_same_states() -> None:
    engine = make_recurrent(num_blocks=200, budget=64, beside=64)
    raised = []

    def fault(plan: BatchPlan) -> None:
        """Every other step of several requests fails once, and so does whatever the request of 13 tokens computes."""
        if 13 in plan.total_lens:
            raise ValueError("always")
        if plan.num_seqs > 1 and len(raised) % 3 != 2:
            raised.append(plan.num_seqs)
            raise ValueError("now and then")
        raised.append(0)

    toy_of(engine).faults = fault
    lengths = (9, 13, 21, 30)
    for length in lengths:
        engine.add(make_job(str(length), prompt(length, length), 15))
    finish(engine)
    assert any(raised)
    failed = {e.key[0] for e in engine.events if isinstance(e, Failed)}
    assert failed == {"9", "13"}, "they pass 13 tokens"
    for length in (21, 30):
        assert tokens_of(engine, str(length)) == expected(prompt(length, length), 15)
    done = tokens_of(engine, "9")
    assert len(done) == 4
    assert done == expected(prompt(9, 9), 4)


def _more(called: list[int], than: int) -> bool:
    return len(called) > than


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_suspended_step_goes_on_with_the_states_of_its_earlier_layers(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspended_steps, "MIN_S", 0.0)
    engine, text = make_recurrent(num_blocks=200), prompt(45)
    called: list[int] = []
    engine.add(make_job("long", text, 9))

    def between(at: int) -> None:
        if at == layer and len(called) < 3:
            called.append(at)

    model = toy_of(engine)
    model.between = between
    turns = 0
    while engine.has_work():
        engine.stepper.suspended.called = partial(_more, called, len(called))
        assert engine.step()
        if engine.stepper.suspended and turns < 3:
            turns += 1
            engine.add(replace(make_job(f"short {turns}", prompt(6, turns), 3), newcomer=True))
    assert turns
    finish(engine)
    assert tokens_of(engine, "long") == expected(text, 9)
    for turn in range(turns):
        assert tokens_of(engine, f"short {turn + 1}") == expected(prompt(6, turn + 1), 3)


def test_one_of_a_suspended_step_is_cancelled_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended_steps, "MIN_S", 0.0)
    engine = make_recurrent(num_blocks=200, budget=64, beside=64)
    for name in "abc":
        engine.add(make_job(name, prompt(15, ord(name)), 9))
    stopped = iter([True])
    model = toy_of(engine)
    engine.stepper.suspended.called = lambda: next(stopped, False) if model.at == 2 else False
    assert engine.step()
    assert engine.stepper.suspended
    engine.cancel("b", 0)
    finish(engine)
    for name in "ac":
        assert tokens_of(engine, name) == expected(prompt(15, ord(name)), 9)
    assert tokens_of(engine, "b") == []


def test_a_cancelled_request_gives_its_rows_back() -> None:
    engine = make_recurrent(rows=1)
    for attempt in range(5):
        engine.add(make_job("a", prompt(30), 9, attempt=attempt))
        engine.step()
        engine.cancel("a", attempt)
        engine.check_integrity()
    engine.add(make_job("b", prompt(30), 9))
    finish(engine)
    assert tokens_of(engine, "b") == expected(prompt(30), 9)
