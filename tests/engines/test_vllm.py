"""Two real vLLM servers behind a router: tokens, places, parameters and deaths are what clients were promised."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine_adapter.fleet import SERVED, Answer, Engine, Fleet, ask
from tests.engines.vllm_fleet import START_S, add_vllm, kill, model_directory, vllm_fleet
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
MOST_DIFFERENCE = 0.01
"""Of prompt tokens, between those that the mirror of KV events promises and those that vLLM reuses."""
BATCHES, AT_ONCE = 125, 8
Asked = list[tuple[list[int], int, dict[str, Any]]]
"""Prompts, numbers of tokens and other fields of requests."""


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with vllm_fleet() as made:
        yield made


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def direct(engine: Engine, tokens: list[int], **more: Any) -> list[int]:
    """Output tokens of the engine itself, without kvferry."""
    body = {"model": SERVED, "prompt": tokens, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more}  # fmt: skip
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return list(told["choices"][0]["token_ids"])


def at_once(made: Fleet, asked: Asked, then: Any = None) -> list[Answer]:
    answers = [Answer() for _ in asked]

    def run(number: int) -> None:
        tokens, count, more = asked[number]
        answers[number] = ask(made, tokens, count, **more)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    if then is not None:
        then()
    for thread in threads:
        thread.join(300)
    return answers


def running_requests(engine: Engine) -> float:
    text = httpx.get(f"{engine.url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_"))


def test_tokens_are_those_of_the_engine_alone(running: Fleet) -> None:
    for seed in range(4):
        tokens = prompt(seed)
        assert ask(running, tokens, 24).tokens == direct(running.engines[0], tokens)


def test_warm_requests_go_where_their_prefix_is_and_the_accounts_are_the_engines(running: Fleet) -> None:
    for seed in range(100, 106):
        tokens = prompt(seed, 260)
        first = ask(running, tokens, 4)
        wait_for(lambda: _cached(running) > 0, 10, running.logs)
        time.sleep(0.5)
        second = ask(running, [*tokens, *prompt(seed + 1, 20)], 4)
        assert first.route == second.route
        assert second.usage["prompt_tokens_details"]["cached_tokens"] == 256


def test_prompts_in_a_thousand_mixed_requests_are_reused_as_the_mirror_promised(running: Fleet) -> None:
    """Shared prefixes of which not all fit: vLLM evicts throughout."""
    chosen, prefixes = random.Random(4), [prompt(seed, 320) for seed in range(2000, 2080)]
    for _ in range(BATCHES):
        asked: Asked = [
            ([*chosen.choice(prefixes), *prompt(chosen.randrange(10**6), 40)], 1, {}) for _ in range(AT_ONCE)
        ]
        assert not [answer.error for answer in at_once(running, asked) if answer.error]
    told = [scrape(engine.adapter_url) for engine in running.engines]
    promised, reused, apart = (
        sum(value(text, f"kvferry_mirror_{name}_tokens") for text in told)
        for name in ("predicted", "actual", "difference")
    )
    asked_for = BATCHES * AT_ONCE * 360
    print(f"of {asked_for} prompt tokens {promised:.0f} were promised, {reused:.0f} reused, {apart:.0f} apart")
    assert reused > 0.2 * asked_for
    assert apart <= MOST_DIFFERENCE * asked_for


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {"100": 100}, "max_tokens": 3},
        {"min_tokens": 5, "ignore_eos": False},
        {"allowed_token_ids": [100, 101, 102]},
        {"guided_regex": "[0-9]{3}-[0-9]{4}", "ignore_eos": False},
        {"stop": ["e"], "ignore_eos": False},
        {"logprobs": 2},
        {"n": 2, "temperature": 0.7, "seed": 11},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_parameters_have_the_effect_that_they_have_on_the_engine(running: Fleet, asked: dict[str, Any]) -> None:
    body = {"model": SERVED, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, **asked}
    own = {"guided_regex": "structured_outputs"}
    theirs = {own.get(key, key): {"regex": value} if key in own else value for key, value in body.items()}
    ours = httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=120).json()
    same = httpx.post(f"{running.engines[0].url}/v1/completions", json=theirs, timeout=120).json()
    assert "error" not in ours, ours
    texts = [[(each["text"], each["finish_reason"]) for each in told["choices"]] for told in (ours, same)]
    if "n" in asked:  # choices of one request have seeds of their own
        assert len(texts[0]) == 2
    else:
        assert texts[0] == texts[1]
    if "logprobs" in asked:
        mine, its = (told["choices"][0]["logprobs"]["token_logprobs"] for told in (ours, same))
        assert mine == pytest.approx(its, abs=1e-4)


def test_clients_that_leave_free_their_engine_within_a_second(running: Fleet) -> None:
    body = {"model": SERVED, "prompt": prompt(5), "max_tokens": 1500, "stream": True, "ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{running.router_url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
            assert sum(map(running_requests, running.engines)) >= 1
        left = time.monotonic()
        wait_for(lambda: sum(map(running_requests, running.engines)) == 0, 5, running.logs)
        assert time.monotonic() - left < 1.5


def test_streams_go_on_with_the_same_tokens_when_an_engine_is_killed(running: Fleet) -> None:
    asked: Asked = [
        (prompt(300 + number, 120), 140, {} if number % 2 else {"presence_penalty": 0.4}) for number in range(6)
    ]
    undisturbed = at_once(running, asked)
    engine = running.engines[1]

    def kill_one() -> None:
        wait_for(lambda: running_requests(engine) >= 1, 30, running.logs)
        time.sleep(1.0)
        kill(engine)

    disturbed = at_once(running, asked, kill_one)
    assert [answer.error for answer in disturbed] == [""] * 6
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    print("longest pauses:", [round(answer.longest_pause_s, 2) for answer in disturbed])
    assert ask(running, prompt(999), 4).tokens
    engine.adapter.end()
    engine.server.end()
    running.engines.remove(engine)
    add_vllm(running, 1, model_directory())
    running.ready(2, START_S)


def _cached(made: Fleet) -> float:
    return sum(value(scrape(engine.adapter_url), "kvferry_index_rows") for engine in made.engines)
