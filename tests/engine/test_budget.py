"""How many tokens of prompts a step may compute beside streams: as many as keep it within its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy import make_engine, make_job

from engine.budget import ALONE, LEAST, Budget, Limits

STREAM_S, TOKEN_S, FIXED_S = 0.010, 0.001, 0.004


def taken(budget: Budget, steps: int = 60, *, stream_s: float = STREAM_S, token_s: float = TOKEN_S) -> list[int]:
    """Tokens of each step of a machine that takes so long, every third step being one of streams alone."""
    found = []
    for number in range(steps):
        if number % 3 == 0:
            budget.stepped(4, 0, stream_s)
        else:
            tokens = budget.tokens(4, ())
            budget.stepped(4, tokens, stream_s + FIXED_S + tokens * token_s)
            found.append(tokens)
    return found


def test_a_step_with_streams_comes_to_take_its_time_and_no_longer() -> None:
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    found = taken(budget)
    assert found[0] == 128, "as many as the limit says while nothing is known"
    assert found[-1] == pytest.approx((0.050 - STREAM_S - FIXED_S) / TOKEN_S, abs=2)
    assert taken(budget, token_s=TOKEN_S / 10)[-1] == 128, "and more again where they are cheap"


def test_on_a_slow_machine_prompts_go_on_all_the_same() -> None:
    assert taken(Budget(Limits(256, 64, 64, beside_s=0.050)), token_s=0.1)[-1] == LEAST
    slow = Budget(Limits(256, 64, 64, beside_s=0.050))
    alone_s = 0.080
    assert taken(slow, stream_s=alone_s)[-1] == min(64, round((ALONE * alone_s - alone_s - FIXED_S) / TOKEN_S))


def test_without_a_time_the_limit_holds() -> None:
    assert set(taken(Budget(Limits(256, 64, 64)))) == {64}


def test_steps_without_streams_have_all_of_it_and_tell_nothing() -> None:
    budget = Budget(Limits(256, 64, 64, beside_s=0.050))
    budget.stepped(0, 256, 5.0)
    assert (budget.tokens(0, ()), budget.tokens(2, ())) == (256, 64)


def test_a_few_tokens_of_a_prompts_end_tell_nothing() -> None:
    budget = Budget(Limits(256, 64, 64, beside_s=0.050))
    for _ in range(20):
        budget.stepped(4, 3, 0.049)
    assert budget.tokens(4, ()) == 64


def test_newcomers_prompts_have_what_they_need_and_others_no_more_for_it() -> None:
    engine = make_engine(num_blocks=256, budget=64, beside=8)
    engine.add(make_job("stream", [1, 2, 3], max_tokens=50))
    engine.step()
    engine.add(make_job("long", [5] * 200))
    for name, length in (("new", 20), ("newer", 7)):
        engine.add(replace(make_job(name, [6] * length), newcomer=True))
    counts = {part.request.key[0]: part.count for part in engine.scheduler.schedule()}
    assert counts == {"stream": 1, "new": 20, "newer": 7}
    assert engine.scheduler.budget.tokens(1, engine.roster.running) == 27
