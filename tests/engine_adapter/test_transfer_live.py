"""A prefill engine and two decode engines, all mocks, behind a router: transfers, their dangers, and deaths."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.protocol.handover_messages import Handover, HandoverOffer
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate
from tests.engine_adapter.fleet import Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.test_adapter_live import at_once, prompt, wait_until_ready
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MOCK = "tests.engine_adapter.mock_vllm"
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 7}, {"frequency_penalty": 0.5}, {"guided_regex": "[a-z]+"},
    {"temperature": 0.7, "seed": 3, "logprobs": 2}, {"presence_penalty": 0.3, "temperature": 0.9, "seed": 1},
]  # fmt: skip
LEASE_S = 20.0
LONG = 600
"""Tokens of a prompt; at PREFILL_S seconds a token, it is cheaper to transfer it than to compute it."""
SEEDS = itertools.count(5000)
"""Of prompts that were never asked before."""
PREFILL_S, STEP_S = {"prefill": 0.0001, "decode": 0.001}, 0.01


def add(made: Fleet, role: str) -> Engine:
    words = ("--role", role, "--kv-bytes-per-token", "256", "--kv-lease", str(LEASE_S), "--canary-rate", "1")
    told: dict[str, Any] = {"transfer": True, "prefill_s": PREFILL_S[role], "step_s": STEP_S, "kv_lease": LEASE_S}
    return made.add(MOCK, "vllm", *words, **told)


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
        yield made
        for engine in made.engines:
            assert engine.behave()["dangers"] == [], engine.name


def restarted(made: Fleet, engine: Engine, role: str) -> None:
    """A new engine with a new adapter in the place of one that died."""
    place = made.engines.index(engine)
    engine.adapter.end()
    engine.server.end()
    made.engines.remove(engine)
    new = add(made, role)
    made.engines.insert(place, made.engines.pop())
    wait_until_ready(new)
    made.ready(2)
    if role == "prefill":  # until the router knows it, too
        wait_for(lambda: remote([ask(made, prompt(next(SEEDS), LONG), 2)], made), 20)


def calls(engine: Engine) -> list[dict[str, Any]]:
    """Bodies of the requests that routers caused: those of measurements and canaries have other salts."""
    return [body for body in engine.behave()["asked"] if not body.get("cache_salt")]


def references(made: Fleet) -> list[str]:
    """References that decode engines got."""
    told = [body.get("kv_transfer_params") for engine in made.engines[1:] for body in calls(engine)]
    return [json.dumps(each, sort_keys=True) for each in told if each]


def computed_by(engine: Engine, body: dict[str, Any]) -> list[int]:
    """The tokens that an engine computes itself for a request."""
    alone = {name: each for name, each in body.items() if name != "kv_transfer_params"} | {"cache_salt": "test"}
    lines = httpx.post(f"{engine.url}/inference/v1/generate", json=alone, timeout=60).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def busy(made: Fleet) -> int:
    return sum(engine.behave()["running"] for engine in made.engines)


def remote(answers: list[Answer], made: Fleet) -> int:
    return sum(f"prefill={made.engines[0].name}" in answer.route for answer in answers)


def test_long_prompts_are_computed_apart_and_the_texts_are_the_same(running: Fleet):
    answers = [ask(running, prompt(900 + seed, LONG), 24, **kind) for seed, kind in enumerate(KINDS)]
    assert [answer.error for answer in answers] == [""] * len(KINDS)
    assert remote(answers, running) == len(KINDS), [answer.route for answer in answers]
    assert all("computed=600" in answer.route for answer in answers)
    for seed, answer in enumerate(answers):
        asked = [body for engine in running.engines[1:] for body in calls(engine)]
        (body,) = [each for each in asked if each["token_ids"] == prompt(900 + seed, LONG)]
        assert answer.tokens == computed_by(running.engines[1], body)
    assert [len(answer.logprobs) for answer in answers] == [24 if "logprobs" in kind else 0 for kind in KINDS]
    used = references(running)
    assert len(used) == len({*used}) == len(KINDS)
    wait_for(lambda: running.engines[0].behave()["pinned"] == 0, LEASE_S)  # the prompt that was measured at join


def test_a_client_s_kv_transfer_params_reach_no_engine(running: Fleet):
    forged = {"do_remote_prefill": True, "remote_engine_id": "forged", "remote_block_ids": [[1]], "remote_port": 1}
    for length in (20, LONG):
        ask(running, prompt(920 + length, length), 2, kv_transfer_params=forged)
    assert all("forged" not in json.dumps(engine.behave()["asked"]) for engine in running.engines)


def test_a_handover_of_another_epoch_or_without_a_ticket_reaches_no_engine(running: Fleet):
    decode = running.engines[1]
    asked = len(decode.behave()["asked"])
    work = Generate(SamplingParams(temperature=0.0, max_tokens=8))
    for epoch, code in ((10**6, "fenced"), (epoch_of(decode), "transfer_failed")):
        job = Job("forged", 0, (1, 2, 3), 3, work, "router")
        handover = Handover(job, "0" * 32, ("p", 1), epoch, 3, 50, "{}", 0.0, 30.0)
        told = httpx.post(f"{decode.adapter_url}/attempts/handover", content=pack(handover), timeout=10)
        assert (told.status_code, told.json()["error"]["code"]) == (503, code)
    assert value(scrape(decode.adapter_url), "kvferry_transfer_refused") == 2
    assert len(decode.behave()["asked"]) == asked


def epoch_of(engine: Engine) -> int:
    """The adapter's epoch, from its refusal of another one."""
    offer = HandoverOffer("forged", 0, ("p", 1), 0)
    told = httpx.post(f"{engine.adapter_url}/attempts/handover/offer", content=pack(offer), timeout=10).json()
    return int(re.findall(r"has epoch (\d+),", told["error"]["message"])[0])


def test_a_client_that_leaves_stops_both_legs_and_what_stays_pinned_is_counted(running: Fleet):
    prefill, *decodes = running.engines
    wait_for(lambda: busy(running) == 0)  # canaries of earlier tests
    for engine in decodes:
        engine.behave(fault="hang")
    body = {"model": "toy", "prompt": prompt(930, LONG), "max_tokens": 50, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.router_url}/v1/completions", json=body, timeout=30) as response:
        told = next(lines := response.iter_lines())  # httpx leaves when the generator is dropped
        assert response.status_code == 200, told
        wait_for(lambda: busy(running), 10, lambda: told + running.logs())
        assert f"prefill={prefill.name}" in response.headers["x-kvferry-route"]
        assert lines
    wait_for(lambda: busy(running) == 0, 5)
    for engine in decodes:
        engine.behave(fault="")

    def pinned() -> float:
        return value(scrape(prefill.adapter_url), "kvferry_transfer_pinned_blocks")

    assert pinned() == -(-LONG // 16)
    wait_for(lambda: pinned() == 0, LEASE_S + 5)


def test_an_engine_that_dies_between_the_legs_costs_no_stream_a_token(running: Fleet):
    prefill = running.engines[0]
    prefill.behave(fault="dies_behind_prefill")
    answer = ask(running, prompt(940, LONG), 30)
    assert prefill.server.popen.wait(10) == 9
    assert answer.error == ""
    asked = [body for engine in running.engines[1:] for body in calls(engine) if body["token_ids"][0] == prompt(940)[0]]
    whole = dict(asked[0], token_ids=prompt(940, LONG))
    whole["sampling_params"] = {**whole["sampling_params"], "max_tokens": 30}
    assert answer.tokens == computed_by(running.engines[1], whole)
    assert prefill.adapter.popen.wait(10) == 1
    restarted(running, prefill, "prefill")


def test_a_decode_engine_that_dies_when_it_fetches_costs_no_stream_a_token(running: Fleet):
    expected = ask(running, prompt(950, LONG), 30)
    for engine in running.engines[1:]:
        engine.behave(fault="dies_on_fetch")
    running.engines[2].behave(fault="")
    answers = [ask(running, prompt(951 + number, LONG), 10) for number in range(3)]
    assert [answer.error for answer in answers] == [""] * 3
    assert all(len(answer.tokens) == 10 for answer in answers)
    dead = running.engines[1]
    if dead.server.popen.poll() is None:
        dead.behave(fault="")
    else:
        assert dead.server.popen.poll() == 9
        restarted(running, dead, "decode")
    assert ask(running, prompt(950, LONG), 30).tokens == expected.tokens


def test_the_prefill_engine_killed_under_streams_costs_none_a_token(running: Fleet):
    undisturbed = at_once(running, KINDS)
    victim = running.engines[0]
    disturbed = at_once(running, KINDS, victim.server.popen.kill)
    assert [answer.error for answer in disturbed] == [""] * len(KINDS)
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    restarted(running, victim, "prefill")


@pytest.mark.parametrize(("corrupt", "seed"), [("first", 1500), ("later", 1600)])
def test_a_pair_whose_transfers_are_wrong_is_parted(running: Fleet, corrupt: str, seed: int):
    """A wrong first token fails the attempt, and the request is computed again; later ones are found by the canary."""
    before = value(scrape(running.router_url), "kvferry_quarantines_total")
    for engine in running.engines[1:]:
        engine.behave(corrupt=corrupt)
    answers = []
    for number in range(30):
        answers.append(ask(running, prompt(seed + number, LONG), 12))
        if len(answers) > 3 and not remote(answers[-3:], running):
            break
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert remote(answers[:1], running) == 1 or corrupt == "first"
    assert not remote(answers[-3:], running), [answer.route for answer in answers]
    assert value(scrape(running.router_url), "kvferry_quarantines_total") > before
    differed = sum(
        value(scrape(engine.adapter_url), "kvferry_canary_looks_total", outcome="differed")
        for engine in running.engines[1:]
    )
    assert (differed > 0) == (corrupt == "later")
    for engine in running.engines[1:]:
        engine.behave(corrupt="")
    if corrupt == "first":
        assert answers[0].tokens == ask(running, prompt(seed, LONG), 12).tokens
        restarted(running, running.engines[0], "prefill")  # a new process, which is not in quarantine
