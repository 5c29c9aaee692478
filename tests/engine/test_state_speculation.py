"""Drafts on models with recurrent layers: no state that saw a wrong draft is used, whatever happens to a stream."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import migration
from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed
from kvferry.engine.state_checkpoints import StateCheckpoints
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.batch_plan import BatchPlan
from tests.engine.carrying import BUDDY, Ship, begin, copy, granted, move_over
from tests.engine.test_speculation import Oracle, figures, make_oracle
from tests.engine.test_speculation import finish as finish_in_steps
from tests.engine.test_state_checkpoints import checkpoints
from tests.recurrent_toy import make_recurrent, toy_of
from tests.toy import VOCAB, expected, finish, make_job, tokens_of
from tests.windowed_toy import make_windowed


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return make_oracle(monkeypatch)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def free_rows(engine: Engine) -> int:
    assert isinstance(engine.states, StateCheckpoints)
    return len(engine.states.row_pool._free)


def test_right_drafts_save_steps(oracle: Oracle) -> None:
    oracle(lambda place: True)
    engine = make_recurrent(drafts=4)
    engine.add(make_job("a", prompt(9), 41))
    assert finish_in_steps(engine) <= 2 + 1 + 40 // 5 + 3
    assert tokens_of(engine, "a") == expected(prompt(9), 41)
    made, drafted, accepted = figures(engine)
    assert (made, accepted) == (40, drafted)


@pytest.mark.parametrize("most", [1, 3, 6])
def test_a_wrong_draft_at_any_place_leaves_no_trace(most: int, oracle: Oracle) -> None:
    """Places, blocks and strides of checkpoints fall together in every way."""
    text = expected(prompt(11), 50)
    made = []
    for wrong in range(-1, most + 1):
        oracle(lambda place, wrong=wrong: place % (most + 1) != wrong)
        engine = make_recurrent(drafts=0 if wrong < 0 else most, stride=4)
        engine.add(make_job("a", prompt(11), 50))
        finish(engine)
        assert tokens_of(engine, "a") == text
        made.append(checkpoints(engine, [*prompt(11), *text]))
        assert 0 < figures(engine)[2] < figures(engine)[1] or wrong < 0
    assert made == [[16, 32, 48]] * (most + 2)


def test_a_session_goes_on_from_a_checkpoint_that_was_made_between_two_drafts(oracle: Oracle) -> None:
    oracle(lambda place: place % 11 != 0)
    engine = make_recurrent(drafts=7, stride=8)
    engine.add(make_job("a", prompt(20), 60))
    finish_in_steps(engine)
    history = [*prompt(20), *expected(prompt(20), 60)]
    assert checkpoints(engine, history) == [16, 32, 64]
    for cut in (33, 65, 79):
        text = [*history[:cut], 5, 6]
        toy_of(engine).computed.clear()
        engine.add(make_job(f"b{cut}", text, 20))
        finish_in_steps(engine)
        assert tokens_of(engine, f"b{cut}") == expected(text, 20)
        assert min(toy_of(engine).computed) == (32 if cut < 64 else 64)


@pytest.mark.parametrize("stop", range(1, 9))
def test_what_follows_the_end_is_not_used(oracle: Oracle, stop: int) -> None:
    oracle(lambda place: True)
    text = expected(prompt(7, 3), 20)
    engine = make_recurrent(drafts=8)
    free = free_rows(engine)
    engine.add(make_job("a", prompt(7, 3), 20, stop_token_ids=(text[stop],)))
    engine.add(make_job("b", prompt(7, 3), stop))
    finish(engine)
    assert tokens_of(engine, "a") == text[: text.index(text[stop]) + 1]
    assert tokens_of(engine, "b") == text[:stop]
    assert free_rows(engine) == free


def test_drafts_use_free_rows_and_give_them_back_before_anyone_asks(oracle: Oracle) -> None:
    oracle(lambda place: True)
    engine = make_recurrent(rows=2, drafts=8, more=1, num_blocks=200)
    free = free_rows(engine)
    for name in "abcd":
        engine.add(make_job(name, prompt(9, ord(name)), 30))
    while engine.has_work():
        assert engine.step()
        assert free_rows(engine) == free - ROWS * len(engine.request_table.running)
        engine.check_integrity()
    for name in "abcd":
        assert tokens_of(engine, name) == expected(prompt(9, ord(name)), 30)
    made, drafted, accepted = figures(engine)
    assert made == 4 * 29
    assert 0 < drafted == accepted


def test_without_a_free_row_streams_run_without_drafts(oracle: Oracle) -> None:
    oracle(lambda place: True)
    engine = make_recurrent(rows=1, drafts=4)
    engine.add(make_job("a", prompt(9), 30))
    finish_in_steps(engine)
    assert tokens_of(engine, "a") == expected(prompt(9), 30)
    assert 0 < figures(engine)[1] <= 30, "a row is spare while a state stands at the end of a block"


def test_a_step_with_drafts_that_raises_in_its_middle_is_computed_again(oracle: Oracle) -> None:
    oracle(lambda place: place % 5 != 0)
    engine = make_recurrent(num_blocks=200, budget=64, beside=64, drafts=6)
    raised = []

    def fault(plan: BatchPlan) -> None:
        """Every step of both requests fails, and so does what the shorter one computes behind 45 tokens."""
        together = max(plan.total_lens) - min(plan.total_lens) > 8
        if together or 45 < max(plan.total_lens) < 70:
            raised.append(plan.num_seqs * together)
            raise ValueError

    engine.add(make_job("long", prompt(70, 1), 40))
    engine.add(make_job("short", prompt(20), 60))
    while not (tokens_of(engine, "long") and tokens_of(engine, "short")):
        engine.step()
    toy_of(engine).faults = fault
    finish(engine)
    assert max(raised) > 4, "with drafts"
    assert {e.key[0] for e in engine.events if isinstance(e, Failed)} == {"short"}
    assert tokens_of(engine, "long") == expected(prompt(70, 1), 40)
    done = tokens_of(engine, "short")
    assert done == expected(prompt(20), len(done))
    assert len(done) > 15


@pytest.mark.parametrize("make", [make_recurrent, make_windowed])
def test_a_stream_that_moves_waits_where_the_other_node_expects_it(
    make: type, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be sent only where it stands, so no draft may carry it further."""
    oracle(lambda place: True)
    monkeypatch.setattr(migration, "AHEAD", 6)
    source, target = make(drafts=5), make(drafts=5)
    source.add(make_job("a", prompt(21), 60))
    while len(tokens_of(source, "a")) < 7:
        source.step()
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(20):
        source.step()
    (request,) = source.request_table.running
    assert request.computed_len == move.expected_blocks * request.block_size
    snapshot = source.moving.snapshot(move.transfer)
    assert snapshot is not None
    move_over(source, move, target, grant, snapshot)
    for engine in (source, target):
        finish(engine)
    assert [*tokens_of(source, "a"), *tokens_of(target, "a")] == expected(prompt(21), 60)


def test_a_shipped_prompt_goes_on_with_drafts(oracle: Oracle) -> None:
    oracle(lambda place: place % 4 != 0)
    prefill, decode = make_recurrent(), make_recurrent(drafts=5)
    Ship(prefill, decode, make_job("a", prompt(42), 40)).land()
    finish(decode)
    finish(prefill)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == expected(prompt(42), 40)
    assert figures(decode)[1]


def test_a_lost_stream_goes_on_at_its_buddy_from_a_checkpoint_between_drafts(oracle: Oracle) -> None:
    oracle(lambda place: place % 9 != 0)
    source, buddy = make_recurrent(drafts=6), make_recurrent(drafts=6)
    source.add(replace(make_job("a", prompt(21), 60), buddy=BUDDY))
    while len(tokens_of(source, "a")) < 50:
        source.step()
    assert copy(source, buddy) > 16
    known = [*prompt(21), *tokens_of(source, "a")]
    buddy.add(replace(make_job("a", known, 60, attempt=1), prompt_len=21))
    finish(buddy)
    assert tokens_of(buddy, "a") == expected(prompt(21), 60)[len(known) - 21 :]
    assert min(toy_of(buddy).computed) == 64


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_drafts_beside_preemptions_forks_and_cancels(data: st.DataObject) -> None:
    draw = data.draw
    wrong, drafts = draw(st.sets(st.integers(0, 11))), draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        make_oracle(patch)(lambda place: place % 12 not in wrong)
        engine = make_recurrent(
            num_blocks=draw(st.integers(40, 90)), stride=draw(st.sampled_from([1, 4, 8, 100])), drafts=drafts,
            budget=draw(st.integers(9, 40)), rows=draw(st.integers(2, 8)), more=draw(st.integers(0, 12)),
        )  # fmt: skip
        free, wanted = free_rows(engine), dict[str, list[int]]()
        for number in range(draw(st.integers(1, 8))):
            name, text, most = str(number), prompt(draw(st.integers(1, 40)), number % 3), draw(st.integers(1, 40))
            fork = draw(st.sampled_from(["", *wanted]))
            wanted[name] = expected(text, most)
            engine.add(replace(make_job(name, text, most), fork_of=fork))
            for _ in range(draw(st.integers(0, 9))):
                engine.step()
            engine.check_integrity()
            running = [request for request in engine.request_table.running if request.transfer is None]
            what = draw(st.sampled_from(["", "preempt", "cancel"])) if running else ""
            if what == "preempt":
                engine.scheduler.preempt(draw(st.sampled_from(running)))
            elif what == "cancel":
                gone = draw(st.sampled_from(running)).key[0]
                engine.cancel(gone, 0)
                wanted.pop(gone)
        finish(engine)
        assert free_rows(engine) == free
        for name, tokens in wanted.items():
            assert tokens_of(engine, name) == tokens
