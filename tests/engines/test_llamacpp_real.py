"""Real llama.cpp servers behind a router: tokens, parameters, errors and deaths are what clients were promised."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.model_files.source import resolve
from kvferry.model_files.tokenizer import load_tokenizer
from tests.engine_adapter.fleet import SERVED, Answer, Fleet, ask
from tests.engines.llamacpp_server import CONTEXT, add_llamacpp, busy_slots, direct, llamacpp_fleet
from tests.waiting import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
TOKENIZER = load_tokenizer(resolve("smollm2", weights=False))
PLAIN = "The history of the city begins with a small village on the river, where"
EMOJI = "Emoji: 😀 😀 😀 😀 漢字 漢字 😀 🏳️‍🌈 😀"


def ids(text: str) -> list[int]:
    return list(TOKENIZER.library.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with llamacpp_fleet(2) as made:
        yield made


def posted(made: Fleet, **fields: Any) -> httpx.Response:
    body = {"model": SERVED, "temperature": 0, "max_tokens": 40, **fields}
    return httpx.post(f"{made.router_url}/v1/completions", json=body, timeout=120)


@pytest.mark.parametrize("text", [PLAIN, EMOJI], ids=["plain", "characters of several tokens"])
def test_greedy_answers_are_llamacpps_own(running: Fleet, text: str) -> None:
    own = direct(running.engines[0], ids(text), 40)
    answer = ask(running, ids(text), 40)
    assert not answer.error
    assert answer.tokens == own["tokens"][: len(answer.tokens)]
    assert len(answer.tokens) == 40 or TOKENIZER.decode(own["tokens"]).endswith("\ufffd")
    assert answer.usage["completion_tokens"] == len(answer.tokens) >= 37  # half a character is not streamed


def test_parameters_mean_what_they_mean_to_llamacpp(running: Fleet) -> None:
    asked = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "min_p": 0.02, "top_k": 30, "presence_penalty": 0.7,
             "frequency_penalty": 0.3, "logit_bias": {"260": -50.0}}  # fmt: skip
    own = direct(running.engines[0], ids(PLAIN), 40, **asked)
    answer = ask(running, ids(PLAIN), 40, **asked)
    assert answer.tokens == own["tokens"]
    assert 260 not in answer.tokens
    assert answer.tokens != ask(running, ids(PLAIN), 40).tokens


def test_defaults_are_the_apis_and_not_llamacpps(running: Fleet) -> None:
    """llama.cpp's own are top_k 40, top_p 0.95 and min_p 0.05."""
    own = direct(running.engines[0], ids(PLAIN), 40, temperature=1.5, seed=11)
    assert ask(running, ids(PLAIN), 40, temperature=1.5, seed=11).tokens == own["tokens"]


def test_log_probabilities_are_llamacpps(running: Fleet) -> None:
    own = direct(running.engines[0], ids(PLAIN), 8, n_probs=2)["completion_probabilities"]
    answer = ask(running, ids(PLAIN), 8, logprobs=2)
    assert answer.logprobs == pytest.approx([row["logprob"] for row in own], abs=0.02)
    assert len(ask(running, ids(EMOJI), 24, logprobs=0).logprobs) == 24


def test_a_schema_a_grammar_and_a_stop_string_hold(running: Fleet) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    text = posted(running, prompt="A person as JSON: ", guided_json=schema, max_tokens=100).json()["choices"][0]["text"]
    assert set(json.loads(text)) == {"name", "age"}
    told = posted(running, prompt="Answer: ", guided_grammar='root ::= "yes" | "no"', ignore_eos=True).json()
    assert told["choices"][0]["text"] in ("yes", "no")
    told = posted(running, prompt=PLAIN, stop=["e"]).json()["choices"][0]
    assert (told["finish_reason"], "e" in told["text"]) == ("stop", False)


def test_what_llamacpp_refuses_is_told_to_the_client(running: Fleet) -> None:
    told = posted(running, prompt=list(range(500, 500 + CONTEXT)), max_tokens=4)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
    told = posted(running, prompt="a", bad_words=["b"])
    assert (told.status_code, told.json()["error"]["param"]) == (400, "bad_words")
    told = posted(running, prompt=(ids(PLAIN) * 99)[: CONTEXT - 20], max_tokens=100)
    assert told.status_code == 400
    assert ask(running, list(range(500, 480 + CONTEXT)), 16).finish == "length"


def test_a_cancelled_stream_frees_its_slot_within_two_seconds(running: Fleet) -> None:
    body = {"model": SERVED, "prompt": PLAIN, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.router_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
        assert sum(map(busy_slots, running.engines)) == 1
    began = time.monotonic()
    wait_for(lambda: sum(map(busy_slots, running.engines)) == 0, 10)
    assert time.monotonic() - began < 2.0


def test_streams_go_on_when_a_server_is_killed(running: Fleet) -> None:
    """The tokens are those of the lost server as far as llama.cpp keeps them; a stream that differs says so."""
    prompts = [ids(f"{number}. {PLAIN}") for number in range(4)]
    answers = [Answer() for _ in prompts]

    def run(number: int) -> None:
        answers[number] = ask(running, prompts[number], 150)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(map(busy_slots, running.engines)) == len(prompts), 30)
    time.sleep(1.0)
    victim = max(running.engines, key=busy_slots)
    assert busy_slots(victim)
    victim.server.popen.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    whole = [answer for answer in answers if not answer.error]
    assert all("replay_differs" in answer.error for answer in answers if answer.error)
    assert [len(answer.tokens) for answer in whole] == [150] * len(whole)
    assert len(whole) >= 2
    assert victim.adapter.popen.wait(30) == 1
    running.engines.remove(victim)
    victim.adapter.end()
    add_llamacpp(running)
    running.ready(2)


def test_the_openai_client_reads_llamacpps_text() -> None:
    with llamacpp_fleet(1, "openai", "--tokenizer", "smollm2") as made:
        for text in (PLAIN, EMOJI):
            own = direct(made.engines[0], ids(text), 40, ignore_eos=False)
            answer = ask(made, ids(text), 40, ignore_eos=False)
            assert not answer.error
            whole = own["content"].rstrip("\ufffd")  # half a character is not streamed
            assert TOKENIZER.decode(answer.tokens) == whole
        log = (made.folder / f"adapter-{made.engines[0].name}.log").read_text()
        assert "sends text alone" in log
