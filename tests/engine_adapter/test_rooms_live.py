"""A prefill engine and two decode engines that speak SGLang's protocol, behind a router: rooms, and legs that fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine_adapter.fleet import Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.mock_sglang import toy_token
from tests.engine_adapter.test_adapter_live import prompt, wait_until_ready
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MOCK = "tests.engine_adapter.mock_sglang"
COUNT, LONG = 24, 200
SEEDS = itertools.count(9000)
"""Of prompts that were never asked before."""


def add(made: Fleet, role: str) -> Engine:
    return made.add(MOCK, "sglang", "--role", role, "--kv-bytes-per-token", "256", mode=role, step_s=0.005)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """The first engine computes prompts, the other two decode."""
    with fleet() as made:
        for role in ("prefill", "decode", "decode"):
            add(made, role)
        made.start_router("smollm2")
        made.ready(2)
        for engine in made.engines:
            wait_until_ready(engine)
        wait_for(lambda: not ask(made, prompt(next(SEEDS), LONG), 2).error, 30, made.logs)
        yield made
        assert made.engines[0].behave()["dangers"] == []


def expected(tokens: list[int], count: int = COUNT) -> list[int]:
    """What one server alone would answer, greedily."""
    whole = list(tokens)
    for _ in range(count):
        whole.append(toy_token(whole, {"temperature": 0, "sampling_seed": 0}))
    return whole[len(tokens) :]


def behave(engines: list[Engine], **changes: Any) -> None:
    for engine in engines:
        engine.behave(**changes)


def rooms(engine: Engine) -> list[tuple[str, int]]:
    """Rooms that an engine was sent to by routers: not those of its adapter's measurement."""
    asked = [body for body in engine.behave()["asked"] if not body["rid"].startswith("measured")]
    return [(body["bootstrap_host"], body["bootstrap_room"]) for body in asked]


def exact(answer: Answer, tokens: list[int]) -> bool:
    return (answer.error, answer.tokens) == ("", expected(tokens))


def test_both_legs_meet_in_a_room_of_their_own(running: Fleet):
    prompts = [prompt(next(SEEDS), LONG) for _ in range(6)]
    answers = [ask(running, tokens, COUNT) for tokens in prompts]
    assert all(exact(*pair) for pair in zip(answers, prompts, strict=True)), answers
    drawn = [room for host, room in rooms(running.engines[0]) if host != "2.2.2.2"]
    met = [room for engine in running.engines[1:] for _, room in rooms(engine)]
    assert len(set(drawn)) == len(drawn) >= 6
    assert sorted(drawn) == sorted(met)


def test_a_prompt_alone_needs_no_decode_engine(running: Fleet):
    tokens = prompt(next(SEEDS), LONG)
    before = [len(rooms(engine)) for engine in running.engines]
    assert ask(running, tokens, 1).tokens == expected(tokens, 1)
    assert [len(rooms(engine)) for engine in running.engines] == [before[0] + 1, *before[1:]]


def test_a_room_of_a_client_never_reaches_an_engine(running: Fleet):
    answer = ask(running, prompt(next(SEEDS), LONG), 3, bootstrap_host="10.0.0.9", bootstrap_room=7, bootstrap_port=1)
    assert answer.error == ""
    told = [each for engine in running.engines for each in rooms(engine)]
    assert not any(host == "10.0.0.9" or room == 7 for host, room in told)


def test_a_decode_engine_that_comes_late_is_waited_for(running: Fleet):
    behave(running.engines[1:], late_s=1.0)
    tokens = prompt(next(SEEDS), LONG)
    assert exact(ask(running, tokens, COUNT), tokens)
    behave(running.engines[1:], late_s=0.0)


def test_a_prefill_leg_that_fails_ends_the_decode_leg(running: Fleet):
    behave(running.engines[:1], fault="fails")
    answer = ask(running, prompt(next(SEEDS), LONG), 400)
    behave(running.engines[:1], fault="")
    assert answer.error
    assert answer.tokens == []
    wait_for(lambda: all(engine.behave()["running"] == 0 for engine in running.engines), 5, running.logs)
    tokens = prompt(next(SEEDS), LONG)
    wait_for(lambda: exact(ask(running, tokens, COUNT), tokens), 60, running.logs)


def test_a_decode_leg_that_fails_aborts_the_prefill_leg(running: Fleet):
    aborted = len(running.engines[0].behave()["aborted"])
    behave(running.engines[1:], fault="fails")
    answer = ask(running, prompt(next(SEEDS), LONG), COUNT)
    behave(running.engines[1:], fault="")
    assert answer.error
    assert len(running.engines[0].behave()["aborted"]) > aborted
    wait_for(lambda: running.engines[0].behave()["running"] == 0, 5, running.logs)
    tokens = prompt(next(SEEDS), LONG)
    wait_for(lambda: exact(ask(running, tokens, COUNT), tokens), 60, running.logs)


def test_a_decode_engine_that_dies_in_a_room_costs_its_request_nothing(running: Fleet):
    victim = running.engines[1]
    victim.behave(fault="dies")
    for _ in range(8):
        tokens = prompt(next(SEEDS), LONG)
        assert exact(ask(running, tokens, COUNT), tokens)
        if victim.server.popen.poll() is not None:
            break
    assert victim.adapter.popen.wait(5) == 1
    assert running.engines[0].behave()["running"] == 0


def test_blocks_of_another_prompt_are_never_served(running: Fleet):
    """Both engines tell the first token. Where they differ, the pair is quarantined, as pairs of own nodes are."""
    behave(running.engines[:1], fault="wrong")
    answer = ask(running, prompt(next(SEEDS), LONG), COUNT)
    assert answer.error
    assert answer.tokens == []
    wait_for(lambda: all(engine.behave()["running"] == 0 for engine in running.engines if alive(engine)), 5)
    behave(running.engines[:1], fault="")


def alive(engine: Engine) -> bool:
    return engine.server.popen.poll() is None
