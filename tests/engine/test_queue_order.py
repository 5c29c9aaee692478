"""Who goes first in an engine: streams that began, attempts that were refused before, then prompts by fair queuing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Admitted, Generated, Reserved
from kvferry.protocol.errors import Cancelled
from kvferry.protocol.messages import Job, TokenDelta
from tests.toy import VOCAB, expected, finish, make_engine, make_job, tokens_of


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def resumed(name: str, tokens: list[int], delivered: int, max_tokens: int = 8) -> Job:
    """An attempt that goes on behind what an earlier one delivered."""
    job = make_job(name, [*tokens, *expected(tokens, delivered)], max_tokens, attempt=1)
    return replace(job, prompt_len=len(tokens))


def order(engine: Engine) -> list[str]:
    """Names in the order of their first output here."""
    return list(dict.fromkeys(e.key[0] for e in engine.events if isinstance(e, Generated)))


def admitted(engine: Engine) -> list[str]:
    return [e.key[0] for e in engine.events if isinstance(e, Admitted)]


def test_a_stream_that_comes_in_the_middle_passes_all_prompts() -> None:
    engine = make_engine(num_blocks=256, budget=8, beside=8, seqs=16)
    for i in range(6):
        engine.add(make_job(f"new{i}", prompt(24, i), max_tokens=1))
    engine.step()
    engine.add(resumed("stream", prompt(30, 9), delivered=4))
    finish(engine)
    assert order(engine)[0] == "stream"
    assert tokens_of(engine, "stream") == expected(prompt(30, 9), 8)[4:]


def test_a_stream_that_comes_in_the_middle_finds_a_seat_where_all_are_taken() -> None:
    engine = make_engine(seqs=2)
    for i in range(4):
        engine.add(make_job(f"r{i}", prompt(5, i), max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.add(resumed("stream", prompt(6, 9), delivered=2))
    engine.step()
    assert admitted(engine) == ["r0", "r1", "stream"]
    finish(engine)


def test_blocks_are_kept_for_a_stream_that_comes_in_the_middle() -> None:
    engine = make_engine(num_blocks=64, budget=256, beside=256)
    engine.add(make_job("large", prompt(220), max_tokens=4))
    engine.step()
    engine.reserve("g", make_job("new", prompt(27, 1)))
    engine.step()
    assert not any(isinstance(e, Reserved) for e in engine.events), "one block of 32 is left to those that began"
    engine.add(resumed("stream", prompt(22, 9), delivered=2))
    engine.step()
    assert admitted(engine) == ["large", "stream"]


def test_a_stream_that_came_in_the_middle_is_preempted_last() -> None:
    engine = make_engine(num_blocks=12, budget=64, beside=64)
    for i in range(2):
        engine.add(make_job(f"r{i}", prompt(7, i), max_tokens=25))
        engine.step()
    engine.add(resumed("stream", prompt(6, 9), delivered=2, max_tokens=25))
    while len(tokens_of(engine, "stream")) < 23:
        assert engine.step()
        assert not any(r.key[0] == "stream" for r in engine.request_table.waiting)
    assert engine.scheduler.preempted_total > 0
    finish(engine)


def test_a_short_prompt_does_not_wait_for_a_long_one_that_is_being_computed() -> None:
    engine = make_engine(num_blocks=256, budget=16, beside=16)
    engine.add(make_job("long", prompt(240), max_tokens=1))
    engine.step()
    engine.add(make_job("short", prompt(12, 1), max_tokens=1))
    engine.step()
    assert order(engine) == ["short"]
    finish(engine)
    assert tokens_of(engine, "long") == expected(prompt(240), 1)


@pytest.mark.parametrize("length", [40, 80, 160])
def test_a_long_prompt_is_passed_until_it_would_have_had_an_equal_share(length: int) -> None:
    engine = make_engine(num_blocks=256, budget=16, beside=16)
    engine.add(make_job("long", prompt(length), max_tokens=1))
    steps = 0
    while "long" not in order(engine):
        engine.add(make_job(f"short{steps}", prompt(16, steps), max_tokens=1))
        engine.step()
        steps += 1
        assert steps <= 3 * length // 16 + 2
    assert steps > length // 16 + 1
    finish(engine)


def test_a_long_prompt_that_comes_by_a_grant_is_passed_until_it_would_have_had_an_equal_share() -> None:
    """A crowd of them that waited for room held up all that came after it, however short."""
    engine = make_engine(num_blocks=32, budget=16, beside=16)
    engine.add(make_job("stream", prompt(20), max_tokens=60))
    engine.step()
    engine.reserve("long", make_job("long", prompt(100, 1)))
    passed = 0
    while passed < 100:
        engine.add(make_job(f"short{passed}", prompt(7, passed + 2), max_tokens=1))
        engine.step()
        engine.step()
        if f"short{passed}" not in order(engine):
            break
        passed += 1
    assert 8 <= passed <= 26
    engine.cancel("stream", 0)
    engine.step()
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["long"]


def test_a_short_prompt_passes_a_crowd_of_long_ones_that_has_waited_for_some_time() -> None:
    """The crowd's own work had made all of it due before anything that came later: pauses of three seconds."""
    engine = make_engine(num_blocks=256, budget=16, beside=16)
    for i in range(8):
        engine.add(make_job(f"long{i}", prompt(100, i), max_tokens=1))
    for _ in range(20):
        engine.step()
    engine.add(make_job("short", prompt(12, 9), max_tokens=1))
    engine.step()
    assert order(engine)[-1] == "short"
    assert len(order(engine)) < 8
    finish(engine)


def test_a_short_prompt_takes_blocks_before_a_crowd_of_long_ones_that_has_waited_for_some_time() -> None:
    engine = make_engine(num_blocks=32, budget=16, beside=16)
    engine.add(make_job("stream", prompt(60), max_tokens=32))
    for i in range(6):
        engine.reserve(f"g{i}", make_job(f"long{i}", prompt(100, i + 1)))
    for _ in range(30):
        engine.step()
    engine.reserve("g", make_job("short", prompt(20, 9)))
    assert engine.request_table.waiting[0].key[0] == "short"
    engine.step()
    assert [e.owner for e in engine.events if isinstance(e, Reserved)] == ["g"]


def test_prompts_that_are_not_computed_yet_hold_a_quarter_of_the_blocks_at_most() -> None:
    """A crowd held half of a decode node's blocks for seconds before the prefill nodes came to its prompts."""
    engine = make_engine(num_blocks=64, budget=64, beside=64)
    for i in range(6):
        engine.reserve(f"g{i}", make_job(f"long{i}", prompt(28, i)))
    engine.step()
    reserved = [event for event in engine.events if isinstance(event, Reserved)]
    assert [event.owner for event in reserved] == ["g0", "g1"]
    engine.add(make_job("local", prompt(40, 7), max_tokens=2))
    engine.reserve("gs", resumed("stream", prompt(30, 9), delivered=4))
    engine.step()
    assert order(engine) == ["local"], "blocks are left"
    assert [event.owner for event in engine.events if isinstance(event, Reserved)][2:] == ["gs"]
    assert engine.scheduler.refused.key[0] == "long2"
    engine.start("g0", TokenDelta("long0", 0, 0, (expected(prompt(28, 0), 1)[0],)))
    engine.step()
    assert [event.owner for event in engine.events if isinstance(event, Reserved)][3:] == ["g2"]


def test_a_prompt_longer_than_that_quarter_waits_for_the_others_and_then_is_taken() -> None:
    engine = make_engine(num_blocks=64, budget=64, beside=64)
    engine.reserve("g0", make_job("short", prompt(8)))
    engine.reserve("g1", make_job("long", prompt(100, 1)))
    engine.step()
    assert [event.owner for event in engine.events if isinstance(event, Reserved)] == ["g0"]
    engine.withdraw("g0", Cancelled("gone"))
    engine.step()
    assert [event.owner for event in engine.events if isinstance(event, Reserved)] == ["g0", "g1"]


def test_an_attempt_that_was_refused_before_passes_those_that_come_for_the_first_time() -> None:
    engine = make_engine(num_blocks=16, seqs=4)
    engine.reserve("holds", make_job("holds", prompt(50)))
    engine.step()
    for i in range(3):
        engine.reserve(f"g{i}", make_job(f"first{i}", prompt(10, i)))
    engine.reserve("again", replace(make_job("again", prompt(20, 7)), failures=1))
    engine.reserve("thrice", replace(make_job("thrice", prompt(30, 8)), failures=3))
    engine.reserve("hedge", make_job("hedge", prompt(40, 9), attempt=1))
    names = ["thrice", "again", "first0", "first1", "first2", "hedge"]
    assert [r.key[0] for r in engine.request_table.waiting] == names, "a second attempt is no later one"


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_newcomers_prompt_goes_first_and_takes_what_streams_leave_of_a_step(newcomer: bool) -> None:
    engine = make_engine(num_blocks=128, budget=64, beside=8)
    engine.add(make_job("stream", prompt(5), max_tokens=100))
    engine.step()
    engine.add(make_job("before", prompt(20, 1), max_tokens=1))
    engine.add(replace(make_job("new", prompt(60, 2), max_tokens=1), newcomer=newcomer))
    for _ in range(2):
        engine.step()
    assert order(engine) == (["stream", "new"] if newcomer else ["stream"])
    finish(engine)
    assert tokens_of(engine, "new") == expected(prompt(60, 2), 1)


def test_the_same_arrivals_run_in_the_same_order() -> None:
    def run() -> list[str]:
        engine, source = make_engine(num_blocks=64, budget=16, beside=8), random.Random(3)
        for i in range(30):
            engine.add(make_job(f"r{i}", prompt(source.randrange(1, 40), i), max_tokens=source.randrange(1, 9)))
            if source.random() < 0.5:
                engine.step()
        finish(engine)
        return order(engine)

    assert run() == run()
