"""Real vLLM servers with NIXL: one computes prompts for the other, and the tokens are those of a server alone."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvferry.cli.engines import nixl, transfer_env
from tests.engine_adapter.fleet import Answer, Fleet, ask, fleet
from tests.engines.test_vllm import at_once, direct, prompt
from tests.engines.vllm_fleet import START_S, add_vllm, kill, model_directory
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
LEASE_S = 30.0
LENGTHS = (640, 512, 700, 333, 1000, 256)
"""Tokens of prompts: whole blocks of 32 tokens, and parts of one."""
KINDS: tuple[dict[str, Any], ...] = ({}, {"frequency_penalty": 0.5}, {"logit_bias": {"260": -50.0}})
OUT = 24
SEEDS = itertools.count(7000)
"""Of prompts that were never asked before."""


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """A prefill engine and a decode engine. An idle NIXL thread spins, so that both give way to all others."""
    model = model_directory()
    with fleet() as made:
        try:
            for number, role in enumerate(("prefill", "decode")):
                config = ("--kv-transfer-config", json.dumps(nixl(LEASE_S)))
                words = ("--role", role, "--kv-transfer", "nixl", "--kv-lease", str(LEASE_S), "--canary-rate", "1")
                env = {**transfer_env("127.0.0.1"), "OMP_NUM_THREADS": "1"}
                add_vllm(made, number, model, *config, words=words, env=env, pinned=False)
            made.start_router(str(model))
            made.ready(1, START_S)
            wait_for(lambda: remote([ask(made, prompt(next(SEEDS), 640), 2)], made) > 0, START_S, made.logs)
            yield made
        finally:
            for engine in made.engines:
                kill(engine)


def remote(answers: Sequence[Answer], made: Fleet) -> int:
    return sum(f"prefill={made.engines[0].name}" in answer.route for answer in answers)


def test_prompts_computed_apart_give_the_tokens_of_one_server(running: Fleet) -> None:
    decode = running.engines[1]
    apart = 0
    for turn, kind in enumerate(KINDS):
        prompts = [prompt(1000 * turn + length, length) for length in LENGTHS]
        answers = at_once(running, [(tokens, OUT, kind) for tokens in prompts])
        assert [answer.error for answer in answers] == [""] * len(prompts)
        apart += remote(answers, running)
        for asked, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == direct(decode, asked, cache_salt=f"alone {turn}", **kind)
    assert apart >= len(KINDS)
    told = scrape(decode.adapter_url)
    assert value(told, "kvferry_canary_looks_total", outcome="agreed") >= 1
    assert value(told, "kvferry_canary_looks_total", outcome="differed") == 0


def test_a_prompt_that_both_know_is_not_transferred_again(running: Fleet) -> None:
    known = prompt(5000, 640)
    first, again = ask(running, known, 4), ask(running, known, 4)
    assert first.tokens == again.tokens
    assert again.usage["prompt_tokens_details"]["cached_tokens"] >= 608


def test_streams_go_on_when_the_prefill_engine_is_killed(running: Fleet) -> None:
    """What runs ends with its tokens; later prompts are computed where they are decoded."""
    decode = running.engines[1]
    prompts = [prompt(6000 + number, 400) for number in range(4)]
    dies = threading.Timer(1.5, kill, (running.engines[0],))
    dies.start()
    answers = at_once(running, [(tokens, OUT, {}) for tokens in prompts])
    dies.join()
    later = ask(running, prompt(6100, 400), OUT)
    assert [answer.error for answer in (*answers, later)] == [""] * 5
    for asked, answer in zip((*prompts, prompt(6100, 400)), (*answers, later), strict=True):
        assert answer.tokens == direct(decode, asked, cache_salt="alone")
    assert remote([later], running) == 0
    assert running.engines[0].adapter.popen.wait(30) == 1
