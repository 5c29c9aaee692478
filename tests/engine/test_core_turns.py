"""An engine computes while it has the cores, hands them on in time, and never depends on them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from kvferry.engine.models.base import KeepGoing
from kvferry.engine.runner import MAX_WHOLE_TOKENS
from kvferry.engine.shared_cores.core_turns import MAX_WAIT_S, MIN_TURN_S, CoreTurns
from kvferry.kernels.decoder_step import always
from tests.toy import expected, make_engine, make_job, runner_of, tokens_of

TURN_S = 0.05


class Cores:
    """Shared with somebody who, in its turn, keeps them for `theirs_s`."""

    def __init__(self) -> None:
        self.now, self.theirs_s = 100.0, 0.0
        self.held, self.waiting, self.stopped, self.urgent = False, False, False, False
        self.asked: list[float] = []
        self.told: list[bool] = []
        self.asks = False
        self.handed_on = 0

    def clock(self) -> float:
        return self.now

    def acquire(self, within_s: float) -> bool:
        self.asked.append(within_s)
        self.told.append(self.asks)
        wait_s = within_s if self.stopped else self.theirs_s
        self.now += wait_s
        self.held = not self.stopped
        return self.held

    def release(self) -> None:
        assert self.held
        self.held = False
        self.handed_on += 1

    def contended(self) -> bool:
        return self.waiting

    def mark_urgent(self) -> None:
        self.asks = True

    def clear_urgent(self) -> None:
        self.asks = False

    def is_urgent(self) -> bool:
        return self.urgent


@pytest.fixture
def cores() -> Cores:
    return Cores()


@pytest.fixture
def shift(cores: Cores) -> CoreTurns:
    return CoreTurns(cores, TURN_S, cores.clock)


def layers(shift: CoreTurns, cores: Cores, count: int, layer_s: float, **how: bool) -> list[int]:
    """Compute so many. Returns behind which of them the cores were handed on."""
    found = []
    with shift.computing(always, **how) as keep_going:
        for index in range(count):
            assert cores.held or cores.stopped
            cores.now += layer_s
            before = cores.handed_on
            assert keep_going()
            if cores.handed_on > before:
                found.append(index)
    assert not cores.held
    return found


def test_nobody_else_wants_them(shift: CoreTurns, cores: Cores) -> None:
    assert layers(shift, cores, 100, 0.01) == []
    assert cores.handed_on == 1


def test_streams_elsewhere_have_a_token_in_every_turn(shift: CoreTurns, cores: Cores) -> None:
    cores.waiting, cores.theirs_s = True, 0.012
    assert layers(shift, cores, 12, 0.01) == [3, 7, 11]


def test_they_are_kept_for_a_moment_at_least(shift: CoreTurns, cores: Cores) -> None:
    cores.waiting, cores.theirs_s = True, 2 * TURN_S
    assert layers(shift, cores, 12, MIN_TURN_S * 0.4) == [2, 5, 8, 11]


def test_a_step_that_is_one_piece_keeps_them(shift: CoreTurns, cores: Cores) -> None:
    cores.waiting = cores.urgent = True
    assert layers(shift, cores, 12, 0.05, whole=True) == []
    assert cores.handed_on == 1


def test_what_is_urgent_elsewhere_does_not_wait_for_a_turns_end(shift: CoreTurns, cores: Cores) -> None:
    cores.waiting = cores.urgent = True
    assert layers(shift, cores, 6, MIN_TURN_S * 0.6) == [1, 3, 5]
    cores.handed_on = 0
    assert layers(shift, cores, 6, MIN_TURN_S * 0.6, urgent=True) == [], "both are"
    assert [cores.told[0], cores.told[-1]] == [False, True]


def test_short_steps_and_those_with_streams_are_one_piece_and_newcomers_prompts_urgent(cores: Cores) -> None:
    told: list[dict[str, bool]] = []

    class Noted(CoreTurns):
        def computing(self, keep_going: KeepGoing, **how: bool) -> AbstractContextManager[KeepGoing]:  # type: ignore[override]
            told.append(how)
            return super().computing(keep_going, **how)

    engine = make_engine(num_blocks=128, budget=128, beside=80)
    runner_of(engine)._core_turns = Noted(cores, TURN_S)
    engine.add(make_job("long", [1] * (MAX_WHOLE_TOKENS + 1), max_tokens=1))
    engine.step()
    engine.add(make_job("short", [2] * MAX_WHOLE_TOKENS, max_tokens=3))
    engine.step()
    engine.add(make_job("beside", [3] * (MAX_WHOLE_TOKENS + 9), max_tokens=1))
    engine.step()
    engine.add(replace(make_job("newcomer", [4, 5, 6], max_tokens=3), newcomer=True))
    engine.step()
    engine.step()
    assert [(how["whole"], how["urgent"]) for how in told] == [
        (False, False), (True, False), (True, False), (True, True), (True, False)
    ]  # fmt: skip


def test_what_is_not_wanted_is_still_heard(shift: CoreTurns) -> None:
    with shift.computing(lambda: False) as keep_going:
        assert not keep_going()


def test_an_error_leaves_them_free(shift: CoreTurns, cores: Cores) -> None:
    with pytest.raises(ZeroDivisionError), shift.computing(always):
        raise ZeroDivisionError
    assert not cores.held


def test_who_waited_in_vain_computes_and_waits_no_more_until_they_were_free(shift: CoreTurns, cores: Cores) -> None:
    cores.stopped = cores.waiting = True
    assert layers(shift, cores, 3, 1.0) == []
    layers(shift, cores, 3, 0.01)
    cores.stopped = False
    layers(shift, cores, 3, 0.01)
    layers(shift, cores, 3, 0.01)
    assert cores.asked == [MAX_WAIT_S, 0.0, 0.0, MAX_WAIT_S]


def test_a_whole_engine_computes_the_same(cores: Cores) -> None:
    engine = make_engine()
    runner_of(engine)._core_turns = CoreTurns(cores, TURN_S)
    prompt = [1, 2, 3, 4, 5, 6]
    engine.add(make_job("a", prompt, max_tokens=5))
    while engine.has_work():
        engine.step()
    assert tokens_of(engine, "a") == expected(prompt, 5)
    assert len(cores.asked) == 5
    assert not cores.held
