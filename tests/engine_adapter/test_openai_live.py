"""Mock OpenAI servers with adapters behind a router, all processes: what clients see of each kind of server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_adapter.fleet import SERVED, Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.mock_openai import expected, tokenizer
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STEP_S, COUNT = 0.01, 120
PROMPT = list(range(2000, 2060))
MOCK = "tests.engine_adapter.mock_openai"


@pytest.fixture(scope="module")
def exact() -> Iterator[Fleet]:
    with fleet() as made:
        for _ in range(2):
            made.add(MOCK, "openai", step_s=STEP_S, models=["mock"])
        made.start_router("smollm2")
        made.ready(2)
        yield made


@pytest.fixture(scope="module")
def texts() -> Iterator[Fleet]:
    with fleet() as made:
        for _ in range(2):
            words = ("--tokenizer", "smollm2", "--accept-inexact")
            made.add(MOCK, "openai", *words, step_s=STEP_S, form="text", strict=True)
        made.start_router("smollm2")
        made.ready(2)
        yield made


def asked(made: Fleet, prompt: list[int], count: int, **more: Any) -> Answer:
    return ask(made, prompt, count, ignore_eos=False, **more)


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


def killed_under_streams(made: Fleet, streams: int) -> tuple[list[Answer], Engine]:
    """Answers of streams under which the busiest server is killed."""
    answers = [Answer() for _ in range(streams)]

    def run(number: int) -> None:
        answers[number] = asked(made, [*PROMPT, 3000 + number], COUNT)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    time.sleep(COUNT * STEP_S / 3)
    victim = max(made.engines, key=lambda engine: engine.behave()["running"])
    assert victim.behave()["running"]
    victim.server.popen.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    return answers, victim


def replaced(made: Fleet, victim: Engine, *words: str, **behaviour: Any) -> None:
    assert victim.adapter.popen.wait(30) == 1, "the adapter ends with its server"
    victim.adapter.end()
    victim.server.end()
    made.engines.remove(victim)
    added = made.add(MOCK, "openai", *words, step_s=STEP_S, **behaviour)

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{added.adapter_url}/ready", timeout=5).status_code == 200
        return False

    wait_for(ready, 60, made.logs)
    made.ready(2)


def test_tokens_of_a_server_that_tells_them_come_through_and_survive_its_death(exact: Fleet) -> None:
    answers, victim = killed_under_streams(exact, 4)
    assert [answer.error for answer in answers] == [""] * 4
    for number, answer in enumerate(answers):
        assert answer.tokens == expected([*PROMPT, 3000 + number], COUNT)
    replaced(exact, victim, models=["mock"])


def test_an_error_behind_status_200_is_retried_elsewhere(exact: Fleet) -> None:
    exact.engines[0].behave(fault="error_event")
    answers = [asked(exact, [*PROMPT, 5], 20) for _ in range(4)]
    exact.engines[0].behave(fault="")
    assert [(answer.error, answer.tokens) for answer in answers] == [("", expected([*PROMPT, 5], 20))] * 4


def test_a_client_that_leaves_ends_the_servers_work(exact: Fleet) -> None:
    body = {"model": SERVED, "prompt": PROMPT, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{exact.router_url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    wait_for(lambda: sum(engine.behave()["running"] for engine in exact.engines) == 0, 3)


def test_what_the_api_does_not_name_is_refused_before_it_costs_anything(exact: Fleet) -> None:
    before = [len(engine.behave()["asked"]) for engine in exact.engines]
    for field, value in {"top_k": 5, "guided_regex": "a+", "ignore_eos": True, "min_tokens": 2}.items():
        answer = ask(exact, PROMPT, 4, **{"ignore_eos": False, field: value})
        assert ("grammar" if field == "guided_regex" else field) in answer.error
    assert [len(engine.behave()["asked"]) for engine in exact.engines] == before


def test_a_text_is_the_servers_text_and_its_length_the_servers_count(texts: Fleet) -> None:
    """The tokens of a text are not always the model's; what clients read is."""
    answer = asked(texts, PROMPT, COUNT)
    assert not answer.error
    assert text_of(answer.tokens) == text_of(expected(PROMPT, COUNT))
    assert answer.finish == "length"
    body = {"model": SERVED, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    whole = httpx.post(f"{texts.router_url}/v1/completions", json=body, timeout=30).json()
    assert whole["choices"][0]["text"] == text_of(expected(PROMPT, COUNT))


def test_streams_of_text_go_on_elsewhere_if_that_is_accepted(texts: Fleet) -> None:
    answers, victim = killed_under_streams(texts, 4)
    assert [answer.error for answer in answers] == [""] * 4
    assert all(answer.finish == "length" for answer in answers)
    replaced(texts, victim, "--tokenizer", "smollm2", "--accept-inexact", form="text", strict=True)


def test_a_servers_key_comes_from_a_file_and_is_on_no_command_line(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-the-server\n")
    with fleet() as made:
        engine = made.add(MOCK, "openai", "--engine-api-key-file", str(key), key="sk-of-the-server")
        made.start_router("smollm2")
        made.ready(1)
        answer = asked(made, PROMPT, 5)
        command = Path(f"/proc/{engine.adapter.popen.pid}/cmdline").read_bytes()
        assert os.fsencode(str(key)) in command
        assert b"sk-of-the-server" not in command
        assert answer.tokens == expected(PROMPT, 5)
        assert "sk-of-the-server" not in (made.folder / f"adapter-{engine.name}.log").read_text()
