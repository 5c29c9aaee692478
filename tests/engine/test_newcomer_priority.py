"""Streams that wait for a newcomer's prompt, which is computed on their cores, and never for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Event, Generated, Reserved
from kvferry.engine.loop import EngineLoop
from kvferry.engine.shared_cores.newcomer_priority import (
    EARNED_PER_STEP_S,
    MAX_PAUSE_BESIDE_S,
    MAX_PAUSE_S,
    NewcomerPriority,
)
from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.messages import Job, TokenDelta
from tests.toy import expected, make_engine, make_job, tokens_of

PROMPT = [1, 2, 3, 4, 5, 6]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def newcomer() -> Job:
    return replace(make_job("newcomer", PROMPT), newcomer=True)


def reserve(engine: Engine, job: Job) -> None:
    """As the thread does it, before the next step."""
    engine.reserve("g", job)
    engine.stepper.admit_grants()


@pytest.fixture
def shared() -> tuple[Engine, Clock]:
    """An engine whose cores others compute prompts on, with a stream that runs."""
    engine, clock = make_engine(), Clock()
    engine.newcomer_priority = NewcomerPriority(engine.request_table, shares=True, clock=clock)
    engine.add(make_job("stream", PROMPT, max_tokens=100))
    engine.step()
    return engine, clock


def test_a_step_waits_while_a_newcomers_prompt_is_computed(shared: tuple[Engine, Clock]) -> None:
    engine, clock = shared
    assert engine.newcomer_priority.pause_s() == 0
    engine.reserve("other", make_job("other", PROMPT))
    engine.stepper.admit_grants()
    assert engine.newcomer_priority.pause_s() == 0, "only newcomers are waited for"
    reserve(engine, newcomer())
    assert engine.newcomer_priority.pause_s() == MAX_PAUSE_S
    clock.now += 0.3
    assert engine.newcomer_priority.pause_s() == pytest.approx(MAX_PAUSE_S - 0.3)
    engine.start("g", TokenDelta("newcomer", 0, 0, (5,)))
    assert engine.newcomer_priority.pause_s() == 0


def test_a_prompt_that_never_comes_holds_streams_for_a_moment_only(shared: tuple[Engine, Clock]) -> None:
    engine, clock = shared
    reserve(engine, newcomer())
    began, stood = clock.now, 0.0
    for _ in range(50):
        stood += (pause := engine.newcomer_priority.pause_s())
        assert pause <= MAX_PAUSE_S
        clock.now += pause + 1e-6
        assert engine.newcomer_priority.pause_s() == 0
        clock.now += 0.1
        engine.newcomer_priority.stepped(0.1)
    assert stood / (clock.now - began) == pytest.approx(EARNED_PER_STEP_S / (EARNED_PER_STEP_S + 1), rel=0.05)
    engine.withdraw("g", TransferFailed("peer lost"))
    assert engine.newcomer_priority.pause_s() == 0


def test_nobody_waits_where_prompts_have_cores_of_their_own() -> None:
    engine = make_engine()
    engine.add(make_job("stream", PROMPT))
    engine.step()
    reserve(engine, newcomer())
    assert engine.newcomer_priority.pause_s() == 0


def test_a_newcomers_prompt_that_is_computed_here_does_not_wait(shared: tuple[Engine, Clock]) -> None:
    engine, _ = shared
    reserve(engine, newcomer())
    engine.add(replace(make_job("here", list(range(60))), newcomer=True))
    engine.step()
    assert engine.newcomer_priority.pause_s() == 0


def test_a_newcomers_streams_wait_for_its_prompts_for_a_moment_between_two_steps(shared: tuple[Engine, Clock]) -> None:
    engine, clock = shared
    engine.add(replace(make_job("here", PROMPT, max_tokens=3), newcomer=True))
    engine.step()
    reserve(engine, newcomer())
    for _ in range(2):
        assert engine.newcomer_priority.pause_s() == MAX_PAUSE_BESIDE_S
        clock.now += 0.8 * MAX_PAUSE_BESIDE_S
        assert engine.newcomer_priority.pause_s() == pytest.approx(0.2 * MAX_PAUSE_BESIDE_S)
        clock.now += 0.2 * MAX_PAUSE_BESIDE_S + 1e-6
        assert engine.newcomer_priority.pause_s() == 0
        engine.newcomer_priority.stepped(0.01)
    while tokens_of(engine, "here") != expected(PROMPT, 3):
        engine.step()
    engine.newcomer_priority.stepped(1.0)
    assert engine.newcomer_priority.pause_s() == MAX_PAUSE_S, "others' streams do for longer"


@pytest.fixture
def looped() -> Iterator[tuple[EngineLoop, Engine, list[Event]]]:
    engine, events = make_engine(), list[Event]()
    engine.newcomer_priority = NewcomerPriority(engine.request_table, shares=True)

    def take(news: Sequence[Event]) -> None:
        events.extend(news)

    loop = EngineLoop(engine, take)
    loop.start()
    yield loop, engine, events
    loop.stop()


def test_the_thread_runs_no_step_meanwhile_but_takes_commands(
    looped: tuple[EngineLoop, Engine, list[Event]],
) -> None:
    loop, engine, events = looped
    done = threading.Event()

    def begin(engine: Engine) -> None:
        reserve(engine, newcomer())
        engine.add(make_job("stream", PROMPT, max_tokens=4))
        engine.step()
        engine.newcomer_priority.pause_s()
        done.set()

    loop.submit(begin)
    assert done.wait(10)
    time.sleep(0.1)
    made = [e for e in events if isinstance(e, Generated)]
    assert len(made) == 1, "what the command itself stepped"
    began = time.monotonic()
    loop.submit(lambda engine: engine.withdraw("g", TransferFailed("peer lost")))
    while len([e for e in events if isinstance(e, Generated)]) < 4:
        assert time.monotonic() < began + 5
        time.sleep(0.005)
    assert time.monotonic() < began + 0.8 * MAX_PAUSE_S
    engine.transfer_holds.grant_quiet("g")


def test_a_grant_is_answered_before_the_step_that_would_delay_it() -> None:
    engine, order = make_engine(), list[str]()
    run = engine.runner.run

    def noted(*step: object) -> object:
        order.append("step")
        return run(*step)  # type: ignore[arg-type]

    engine.runner.run = noted  # type: ignore[method-assign, assignment]
    loop = EngineLoop(engine, lambda news: order.extend("granted" for e in news if isinstance(e, Reserved)))

    def begin(engine: Engine) -> None:
        engine.add(make_job("stream", PROMPT))
        engine.reserve("g", make_job("remote", PROMPT))

    loop.submit(begin)
    loop.start()
    while "step" not in order:
        time.sleep(0.005)
    loop.stop()
    assert order[0] == "granted"
    assert tokens_of(engine, "stream") == expected(PROMPT, len(tokens_of(engine, "stream")))
