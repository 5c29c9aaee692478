"""How many tokens of prompts a step may compute beside streams: as many as keep it within its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.engine.budget import MAX_SLOWDOWN, MIN_TOKENS, Budget, Limits
from kvferry.engine.request import Request
from tests.toy import make_engine, make_job

FIRST_S, TOKEN_S = 0.010, 0.001


def taken(
    budget: Budget, steps: int = 60, *, decodes: int = 4, here: Sequence[Request] = (),
    first_s: float = FIRST_S, token_s: float = TOKEN_S,
) -> list[int]:  # fmt: skip
    """Tokens of prompts in each step of a machine that takes so long for a step's first row and each further one."""
    found = []
    for _ in range(steps):
        found.append(budget.tokens(decodes, here))
        rows = decodes + found[-1]
        budget.stepped(rows, first_s + (rows - 1) * token_s)
    return found


def test_a_step_with_streams_comes_to_take_its_time_and_no_longer() -> None:
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    found = taken(budget, 150)
    assert found[0] == 128, "as many as the limit says while nothing is known"
    assert found[-1] == pytest.approx((0.050 - FIRST_S) / TOKEN_S + 1 - 4, abs=2)
    assert taken(budget, 300, token_s=TOKEN_S / 10)[-1] == 128, "and more again where they are cheap"


def test_a_step_that_is_long_for_streams_alone_may_take_twice_as_long_though_none_was_seen_without_prompts() -> None:
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    alone_s = FIRST_S + 63 * TOKEN_S
    assert taken(budget, 200, decodes=64)[-1] == pytest.approx((MAX_SLOWDOWN - 1) * alone_s / TOKEN_S, abs=3)


def test_what_a_step_takes_whatever_its_rows_is_not_laid_to_the_prompts() -> None:
    """Chunks that get smaller make no such step shorter, and let prompts wait for ever."""
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    assert taken(budget, 200, first_s=0.2)[-1] > 100


def test_on_a_slow_machine_prompts_go_on_all_the_same() -> None:
    budget = Budget(Limits(256, 64, 64, beside_s=0.050))
    assert taken(budget, 200, decodes=1, first_s=0.1, token_s=0.1)[-1] == MIN_TOKENS


def test_without_a_time_the_limit_holds() -> None:
    assert set(taken(Budget(Limits(256, 64, 64)))) == {64}


def test_steps_without_streams_have_all_of_it_and_tell_what_rows_cost() -> None:
    budget = Budget(Limits(256, 256, 64, beside_s=0.050))
    assert budget.tokens(0, ()) == 256
    budget.stepped(256, FIRST_S + 255 * TOKEN_S)
    assert budget.tokens(1, ()) == pytest.approx((0.050 - FIRST_S) / TOKEN_S, rel=0.2)


def test_steps_of_almost_as_many_rows_that_differ_by_chance_tell_nothing_of_a_row() -> None:
    budget = Budget(Limits(256, 256, 64, beside_s=0.050))
    for rows, seconds in ((256, 0.27), (255, 0.26), (256, 0.30), (250, 0.31), (254, 0.26)) * 4:
        budget.stepped(rows, seconds)
    assert budget.tokens(4, ()) == pytest.approx(30, abs=15)


def test_a_step_that_something_else_held_up_changes_little() -> None:
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    before = taken(budget, 100)[-1]
    budget.stepped(4 + before, 5.0)
    assert taken(budget, 100) == pytest.approx([before] * 100, rel=0.15)


def test_a_machine_that_is_slower_from_now_on_is_learned_all_the_same() -> None:
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    taken(budget, 100, first_s=0.2)
    assert taken(budget, 300, first_s=0.2, token_s=0.05)[-1] == MIN_TOKENS


def test_one_long_step_before_all_others_does_not_leave_prompts_with_the_least_for_ever() -> None:
    """Steps of equal rows tell nothing of a row, so that what it was taken to cost would confirm itself."""
    budget = Budget(Limits(256, 128, 64, beside_s=0.050))
    budget.stepped(4 + 128, 5.0)
    assert taken(budget, 600, first_s=0.2)[-1] > 100


def test_steps_that_take_no_time_by_a_coarse_clock_leave_the_limit() -> None:
    budget = Budget(Limits(256, 64, 64, beside_s=0.050))
    for rows in (64, 4, 68, 4, 128, 1) * 5:
        budget.stepped(rows, 0.0)
        assert budget.tokens(4, ()) == 64


def prompts(count: int) -> list[Request]:
    return [Request(make_job(f"prompt {i}", [7] * 300), b"", 16) for i in range(count)]


def test_while_more_wait_for_a_first_token_than_streams_run_steps_may_take_longer_by_as_much() -> None:
    budget = Budget(Limits(512, 512, 64, beside_s=0.050))

    def step_s(decodes: int, waiting: int) -> float:
        found = taken(budget, 200, decodes=decodes, here=prompts(waiting))[-1]
        return FIRST_S + (decodes + found - 1) * TOKEN_S

    assert step_s(8, 4) == pytest.approx(0.050, rel=0.06)
    assert step_s(8, 8) == pytest.approx(0.050, rel=0.06)
    assert step_s(8, 24) == pytest.approx(0.150, rel=0.06)
    assert step_s(2, 40) == pytest.approx(0.510, rel=0.06), "as much as a step has room for"


def test_those_who_find_no_seat_do_not_make_steps_longer() -> None:
    budget = Budget(Limits(512, 512, 10, beside_s=0.050))
    found = taken(budget, 200, decodes=8, here=prompts(100))[-1]
    assert FIRST_S + (8 + found - 1) * TOKEN_S == pytest.approx(0.050, rel=0.06)


def test_newcomers_prompts_have_what_they_need_and_others_no_more_for_it() -> None:
    engine = make_engine(num_blocks=256, budget=64, beside=8)
    engine.add(make_job("stream", [1, 2, 3], max_tokens=50))
    engine.step()
    engine.add(make_job("long", [5] * 200))
    for name, token, length in (("new", 6, 20), ("newer", 7, 7)):
        engine.add(replace(make_job(name, [token] * length), newcomer=True))
    counts = {part.request.key[0]: part.count for part in engine.scheduler.schedule()}
    assert counts == {"stream": 1, "new": 20, "newer": 7}
    assert engine.scheduler.budget.tokens(1, engine.request_table.running) == 27
