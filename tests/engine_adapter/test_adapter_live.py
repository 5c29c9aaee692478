"""Two mock engines with adapters behind a router, all processes: what clients see while engines misbehave and die."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.engine_adapter.fleet import START_S, Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.mock_tokenizer import encoded, tokenizer
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STEP_S, COUNT = 0.01, 120
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"frequency_penalty": 0.5},
    {"guided_regex": "[a-z]+"},
    {"temperature": 0.7, "seed": 3, "logprobs": 2},
    {"presence_penalty": 0.3, "temperature": 0.9, "seed": 1},
]


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet() as made:
        for _ in range(2):
            made.add(step_s=STEP_S)
        made.start_router("smollm2")
        made.ready(2)
        yield made


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def at_once(made: Fleet, asked: list[dict[str, Any]], then: Any = None) -> list[Answer]:
    """Streams of all these requests at once; `then` is called when each has been running for a while."""
    answers = [Answer() for _ in asked]

    def run(number: int) -> None:
        answers[number] = ask(made, prompt(number), COUNT, **asked[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    if then is not None:
        time.sleep(COUNT * STEP_S / 3)
        then()
    for thread in threads:
        thread.join(60)
    return answers


def busiest(made: Fleet) -> Engine:
    return max(made.engines, key=lambda engine: engine.behave()["running"])


def restarted(made: Fleet, engine: Engine) -> None:
    """A new engine with a new adapter in the place of one that died, so that the next test has two again."""
    engine.adapter.end()
    engine.server.end()
    made.engines.remove(engine)
    wait_until_ready(made.add(step_s=STEP_S))
    made.ready(2)


def wait_until_ready(engine: Engine) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{engine.adapter_url}/ready", timeout=5).status_code == 200
        return False

    wait_for(ready, START_S)


def test_an_adapter_measures_its_engine_and_stays_small():
    """Started as everywhere: a fork has what its parent imported."""
    with fleet(forked=False) as made:
        engine = made.add(step_s=STEP_S)
        wait_until_ready(engine)
        assert psutil.Process(engine.adapter.popen.pid).memory_info().rss < 80 * 2**20


def test_what_the_engine_reused_is_told_with_the_usage(running: Fleet):
    first = ask(running, prompt(900), 4)
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    wait_for(lambda: sum(mirrored(engine, "blocks") for engine in running.engines) >= 6)
    again = ask(running, prompt(900), 4)
    assert again.route == first.route
    assert again.usage["prompt_tokens_details"]["cached_tokens"] == 96
    assert again.tokens == first.tokens


def test_a_killed_engine_costs_no_stream_a_token(running: Fleet):
    undisturbed = at_once(running, KINDS)
    assert not any(answer.error for answer in undisturbed)
    victims: list[Engine] = []

    def kill() -> None:
        victims.append(busiest(running))
        assert victims[0].behave()["running"] > 0
        victims[0].server.popen.kill()

    disturbed = at_once(running, KINDS, kill)
    (victim,) = victims
    assert [answer.error for answer in disturbed] == [""] * len(KINDS)
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    assert [len(answer.logprobs) for answer in disturbed] == [len(answer.logprobs) for answer in undisturbed]
    assert max(answer.longest_pause_s for answer in disturbed) < 10
    assert victim.adapter.popen.wait(5) == 1
    (survivor,) = [engine for engine in running.engines if engine is not victim]
    told = scrape(survivor.adapter_url)
    assert value(told, "kvferry_engine_continued_streams") > 0
    assert value(told, "kvferry_engine_up") == 1
    assert value(told, "kvferry_engine_guarantee", guarantee="kv_events") == 1
    restarted(running, victim)


@pytest.mark.parametrize("way", ["dead_core", "killed_adapter"])
def test_streams_go_on_when_the_core_or_the_adapter_dies(running: Fleet, way: str):
    undisturbed = at_once(running, KINDS[:2])
    victim = running.engines[0]

    def strike() -> None:
        if way == "dead_core":
            victim.behave(fault="dead_core", fault_at=0)
            ask_one = threading.Thread(target=ask, args=(running, prompt(77), 5))
            ask_one.start()
            ask_one.join(30)
        else:
            victim.adapter.popen.send_signal(signal.SIGKILL)

    disturbed = at_once(running, KINDS[:2], strike)
    assert [answer.error for answer in disturbed] == ["", ""]
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    restarted(running, victim)


def test_an_error_behind_status_200_is_retried_elsewhere(running: Fleet):
    expected = ask(running, prompt(5), 20)
    running.engines[0].behave(fault="error_event")
    answers = [ask(running, prompt(5), 20) for _ in range(4)]
    running.engines[0].behave(fault="")
    assert [answer.error for answer in answers] == [""] * 4
    assert all(answer.tokens == expected.tokens for answer in answers)
    wait_for(lambda: running.nodes() == 2, 30, running.logs)


def test_a_client_that_leaves_frees_the_engine_within_a_second(running: Fleet):
    body = {"model": "toy", "prompt": prompt(6), "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.router_url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    wait_for(lambda: sum(engine.behave()["running"] for engine in running.engines) == 0, 3)


def test_bad_words_are_never_drawn(running: Fleet):
    free = ask(running, prompt(7), 24)
    texts = {token: tokenizer().decode([token]) for token in free.tokens}
    token, text = next((t, s) for t, s in texts.items() if s.lstrip() and encoded(s.lstrip()) in ([t], encoded(s)))
    kept = ask(running, prompt(7), 24, bad_words=[text])
    assert kept.error == ""
    assert len(kept.tokens) == 24
    assert token not in kept.tokens
    assert kept.tokens[: free.tokens.index(token)] == free.tokens[: free.tokens.index(token)]


def test_embeddings_are_refused_with_the_fields_name(running: Fleet):
    asked = [len(engine.behave()["asked"]) for engine in running.engines]
    told = httpx.post(f"{running.router_url}/v1/embeddings", json={"model": "toy", "input": "a"}, timeout=30)
    assert (told.status_code, "only generates" in told.text) == (400, True)
    assert [len(engine.behave()["asked"]) for engine in running.engines] == asked


def test_prompt_logprobs_come_back_for_each_token(running: Fleet):
    body = {"model": "toy", "prompt": prompt(8, 20), "max_tokens": 3, "prompt_logprobs": 1, "ignore_eos": True}
    told = httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=30).json()
    rows = told["choices"][0]["prompt_logprobs"]
    assert len(rows) == 20
    assert rows[0] is None
    assert all(rows[1:])


def test_transfer_parameters_of_a_client_never_reach_an_engine(running: Fleet):
    ask(running, prompt(9), 3, kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": [[1]]})
    sent = [body for engine in running.engines for body in engine.behave()["asked"]]
    assert sent
    assert not any("kv_transfer_params" in body or "extra_args" in body["sampling_params"] for body in sent)


def test_a_drained_adapter_lets_its_streams_end(running: Fleet):
    undisturbed = at_once(running, KINDS[:4])
    victim = running.engines[0]
    disturbed = at_once(running, KINDS[:4], lambda: victim.adapter.popen.send_signal(signal.SIGTERM))
    assert [answer.error for answer in disturbed] == [""] * 4
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    assert victim.adapter.popen.wait(30) == 0
    restarted(running, victim)


def test_a_stream_on_an_engine_that_is_not_deterministic_ends_with_the_reason(running: Fleet):
    """With a penalty it can only be replayed, and the replay differs: other tokens would be worse than an error."""
    for engine in running.engines:
        engine.behave(loose=True)
    victims: list[Engine] = []

    def strike() -> None:
        victims.append(busiest(running))
        victims[0].server.popen.kill()

    answers = at_once(running, [{"frequency_penalty": 0.5}] * 5, strike)
    assert [answer.error for answer in answers if answer.error]
    assert all("replay_differs" in answer.error for answer in answers if answer.error)
    restarted(running, victims[0])
    for engine in running.engines:
        engine.behave(loose=False)


def mirrored(engine: Engine, name: str) -> float:
    """A gauge of the adapter's mirror."""
    return value(scrape(engine.adapter_url), f"kvferry_mirror_{name}")


def test_requests_go_where_their_prefix_is_and_the_mirror_is_exact_under_eviction():
    """The engines hold 150 blocks, and the prompts have 25 each: most of what was cached is evicted again."""
    with fleet() as made:
        for _ in range(2):
            made.add(blocks=150)
        made.start_router("smollm2")
        made.ready(2)
        chosen = random.Random(1)
        shared = [prompt(seed, 256) for seed in range(8)]
        for number in range(120):
            begin = shared[min(int(chosen.expovariate(0.6)), 7)]
            answer = ask(made, [*begin, *prompt(1000 + number, 144)], 2)
            assert not answer.error
        wait_for(lambda: all(httpx.get(f"{each.adapter_url}/ready").status_code == 200 for each in made.engines))
        actual = sum(mirrored(engine, "actual_tokens") for engine in made.engines)
        difference = sum(mirrored(engine, "difference_tokens") for engine in made.engines)
        assert actual > 10_000, actual
        assert difference <= actual / 100, (difference, actual)
        assert not any(mirrored(engine, "resets") for engine in made.engines)
