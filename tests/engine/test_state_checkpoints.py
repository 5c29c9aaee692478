"""Checkpoints of recurrent states: where they are made, what is reused from them, and how they leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.engine.state_checkpoints import MIN_STRIDE, stride_of
from kvferry.protocol.hashing import chain, root_hash, state_hashes
from tests.recurrent_toy import make_recurrent, toy_of
from tests.toy import FINGERPRINT, VOCAB, expected, finish, make_job, tokens_of

SIZE = 4
STATE_BLOCKS = 3


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def checkpoints(engine: Engine, tokens: list[int]) -> list[int]:
    """The tokens that whole checkpoints of this sequence have seen."""
    hashes = chain(root_hash(FINGERPRINT), tokens, SIZE)
    return [
        count * SIZE
        for count, each in enumerate(hashes, 1)
        if len(engine.pool.match(state_hashes(each, STATE_BLOCKS))) == STATE_BLOCKS
    ]


def run(engine: Engine, name: str, tokens: list[int], most: int = 8) -> tuple[int, int]:
    """Compute a request and check its tokens; what it reused and computed of its prompt."""
    toy_of(engine).computed.clear()
    engine.add(make_job(name, tokens, most))
    finish(engine)
    assert tokens_of(engine, name) == expected(tokens, most)
    first = next(e for e in engine.events if isinstance(e, Generated) and e.key[0] == name)
    assert first.delta.reuse is not None
    found = first.delta.reuse.reused_decode, first.delta.reuse.computed
    assert sum(found) == len(tokens)
    assert len(toy_of(engine).computed) == found[1] + most - 1, "it computed what it says"
    return found


@pytest.mark.parametrize("length", [61, 64, 65, 68])
def test_a_prompt_that_comes_again_is_reused_up_to_its_last_full_block(length: int) -> None:
    engine = make_recurrent(stride=100)
    assert run(engine, "a", prompt(length), 2) == (0, length)
    reused = (length - 1) // SIZE * SIZE
    assert checkpoints(engine, prompt(length)) == [reused]
    assert run(engine, "b", prompt(length)) == (reused, length - reused)


def test_a_session_goes_on_behind_the_last_full_block_of_its_last_answer() -> None:
    engine = make_recurrent(stride=100)
    run(engine, "a", prompt(30), 20)
    history = [*prompt(30), *expected(prompt(30), 20)]
    assert checkpoints(engine, history) == [28, 48]
    assert run(engine, "b", [*history, 5, 6, 7]) == (48, 5)


def test_a_long_prompt_has_checkpoints_at_strides_and_others_begin_there() -> None:
    engine = make_recurrent(num_blocks=100, stride=8)
    run(engine, "a", prompt(120), 2)
    assert checkpoints(engine, prompt(120)) == [32, 64, 96, 116]
    assert run(engine, "b", [*prompt(75), *prompt(20, 1)]) == (64, 31)


def test_a_beginning_that_two_prompts_share_has_a_checkpoint_for_the_third() -> None:
    engine = make_recurrent(num_blocks=100, stride=100)
    shared = prompt(42)
    assert run(engine, "a", [*shared, *prompt(20, 1)]) == (0, 62)
    assert run(engine, "b", [*shared, *prompt(20, 2)]) == (0, 62)
    assert run(engine, "c", [*shared, *prompt(20, 3)]) == (40, 22)


def test_checkpoints_are_not_nearer_than_a_few_blocks() -> None:
    engine = make_recurrent(num_blocks=100, stride=1)
    run(engine, "a", prompt(70), 2)
    found = checkpoints(engine, prompt(70))
    assert found == [MIN_STRIDE * SIZE * number for number in range(1, 5)]
    run(engine, "b", prompt(MIN_STRIDE * SIZE - 2, 1), 2)
    assert checkpoints(engine, prompt(MIN_STRIDE * SIZE - 2, 1)) == []


def test_without_a_whole_checkpoint_nothing_is_reused() -> None:
    engine = make_recurrent(stride=100)
    run(engine, "a", prompt(61), 2)
    last = state_hashes(chain(root_hash(FINGERPRINT), prompt(61), SIZE)[14], STATE_BLOCKS)[-1]
    engine.pool.forget(engine.pool.match([last]))
    assert run(engine, "b", prompt(61)) == (0, 61)


def test_without_prefix_caching_there_are_none() -> None:
    engine = make_recurrent(caching=False)
    run(engine, "a", prompt(61), 2)
    assert engine.pool.free_blocks == engine.pool.num_blocks
    assert run(engine, "b", prompt(61)) == (0, 61)


def test_under_pressure_a_checkpoint_leaves_before_the_block_that_it_belongs_to() -> None:
    engine = make_recurrent(num_blocks=40, stride=4)
    run(engine, "a", prompt(90), 2)
    hashes = chain(root_hash(FINGERPRINT), prompt(90), SIZE)
    for other in range(1, 12):
        run(engine, str(other), prompt(40, other), 6)
        held = len(engine.pool.match(hashes)) * SIZE
        assert all(at <= held for at in checkpoints(engine, prompt(90)))
    engine.check_integrity()


def test_what_a_preempted_stream_had_computed_is_not_computed_again() -> None:
    engine = make_recurrent(num_blocks=64, stride=100)
    engine.add(make_job("a", prompt(50), 30))
    while len(tokens_of(engine, "a")) < 20:
        engine.step()
    (request,) = engine.request_table.running
    toy_of(engine).computed.clear()
    engine.scheduler.preempt(request)
    engine.check_integrity()
    finish(engine)
    assert tokens_of(engine, "a") == expected(prompt(50), 30)
    assert min(toy_of(engine).computed) == 68, "the last full block of 69 computed tokens"


def test_a_fork_shares_the_blocks_up_to_the_checkpoint_and_computes_the_rest() -> None:
    engine = make_recurrent(stride=100)
    text = prompt(39)
    engine.add(make_job("a", text, 12))
    for _ in range(6):
        engine.step()
    toy_of(engine).computed.clear()
    engine.add(replace(make_job("b", text, 12), fork_of="a"))
    finish(engine)
    assert tokens_of(engine, "b") == expected(text, 12)
    assert toy_of(engine).computed.count(36) == 1
    assert 35 not in toy_of(engine).computed


def test_the_stride_takes_no_more_memory_for_checkpoints_than_for_blocks() -> None:
    assert [stride_of(1, 64), stride_of(64, 64), stride_of(65, 64), stride_of(3, 0)] == [64, 64, 128, 4]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mix_of_sessions_gives_the_tokens_of_one_run(data: st.DataObject) -> None:
    """Sessions that go on, forks and newcomers, in a pool that is too small for all."""
    draw = data.draw
    engine = make_recurrent(
        num_blocks=draw(st.integers(40, 90)), stride=draw(st.sampled_from([1, 4, 8, 100])),
        budget=draw(st.integers(9, 40)), rows=draw(st.integers(2, 8)),
    )  # fmt: skip
    history: list[list[int]] = [prompt(draw(st.integers(1, 60)), seed) for seed in range(3)]
    wanted: dict[str, list[int]] = {}
    for number in range(draw(st.integers(2, 10))):
        begin = draw(st.sampled_from(history))
        text = begin[: draw(st.integers(1, len(begin)))] + prompt(draw(st.integers(0, 20)), number)
        name, most = str(number), draw(st.integers(1, 20))
        wanted[name] = expected(text, most)
        if len(text) + most < 150:
            history.append([*text, *wanted[name]])
        engine.add(make_job(name, text, most))
        for _ in range(draw(st.integers(0, 12))):
            engine.step()
        if draw(st.booleans()) and engine.request_table.running:
            engine.scheduler.preempt(draw(st.sampled_from(engine.request_table.running)))
        engine.check_integrity()
    finish(engine)
    for name, tokens in wanted.items():
        assert tokens_of(engine, name) == tokens
