"""A prefill engine and two decode engines, all mocks, behind a router: transfers, their dangers, and deaths."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine_adapter.fleet import Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.test_adapter_live import at_once, prompt, wait_until_ready
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
MOCK = "tests.engine_adapter.mock_vllm"
PREFILL_S = 0.0002
"""Seconds per prompt token: enough that a transfer is cheaper than to compute a prompt beside streams."""
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 7}, {"frequency_penalty": 0.5}, {"guided_regex": "[a-z]+"},
    {"temperature": 0.7, "seed": 3, "logprobs": 2}, {"presence_penalty": 0.3, "temperature": 0.9, "seed": 1},
]  # fmt: skip


def add(made: Fleet, role: str, *words: str, **behaviour: Any) -> Engine:
    told: dict[str, Any] = {"transfer": True, "prefill_s": PREFILL_S, "step_s": 0.01, **behaviour}
    return made.add(MOCK, "vllm", "--role", role, "--kv-bytes-per-token", "1024", *words, **told)


def start(made: Fleet, *words: str, **behaviour: Any) -> None:
    """One prefill engine, the first of the fleet, and two decode engines behind a router."""
    for role in ("prefill", "decode", "decode"):
        add(made, role, *words, **behaviour)
    made.start_router("smollm2")
    for engine in made.engines:
        wait_until_ready(engine)
    made.ready(3)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet() as made:
        start(made)
        yield made


def seen(engine: Engine, name: str) -> Any:
    return engine.behave()[name]


def fetched(made: Fleet) -> int:
    return sum(seen(engine, "fetched") for engine in made.engines[1:] if engine.server.popen.poll() is None)


def test_a_long_prompt_is_computed_apart_and_the_text_is_the_same(running: Fleet):
    answers = at_once(running, KINDS)
    assert [answer.error for answer in answers] == [""] * len(KINDS)
    print([answer.route for answer in answers])
    assert fetched(running) == len(KINDS)
