"""Elastic adapters of engines that speak SGLang's protocol, behind a router: roles change while requests come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.wire import pack
from tests.engine_adapter.fleet import Answer, Engine, Fleet, ask, fleet
from tests.engine_adapter.test_adapter_live import prompt, wait_until_ready
from tests.engine_adapter.test_rooms_live import COUNT, LONG, MOCK, exact
from tests.local_cluster import scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEEDS = itertools.count(12_000)
"""Of prompts that were never asked before."""
ROLES = ("prefill", "prefill", "decode", "decode")


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """Two engines compute prompts, and two decode; each may change."""
    with fleet() as made:
        for role in ROLES:
            made.add(
                MOCK, "sglang", "--role", role, "--elastic", "--kv-bytes-per-token", "256", "--drain-timeout", "10",
                mode=role, step_s=0.005, switch="on",
            )  # fmt: skip
        made.start_router("smollm2")
        made.ready(2)
        for engine in made.engines:
            wait_until_ready(engine)
        wait_for(lambda: not asked(made).error, 30, made.logs)
        yield made
        assert all(engine.behave()["dangers"] == [] for engine in made.engines)


def asked(made: Fleet, count: int = 2) -> Answer:
    return ask(made, prompt(next(SEEDS), LONG), count)


def role(engine: Engine, role: str) -> httpx.Response:
    """Ask an adapter to take a role, as routers do."""
    return httpx.post(f"{engine.adapter_url}/role", content=pack(ChangeRole(role)), timeout=30)


def has(engine: Engine, role: str) -> bool:
    told: dict[str, Any] = httpx.get(f"{engine.adapter_url}/health", timeout=5).json()
    return (told["role"], told["status"], engine.behave()["mode"]) == (role, "ready", role)


def epoch(engine: Engine) -> float:
    return value(scrape(engine.adapter_url), "kvferry_engine_epoch")


class Load:
    """Requests that come all the time, from three clients. wrong: answers that are not what one server would say."""

    def __init__(self, made: Fleet) -> None:
        self._made, self._stop = made, threading.Event()
        self.done, self.wrong = 0, list[Answer]()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            tokens = prompt(next(SEEDS), LONG)
            answer = ask(self._made, tokens, COUNT)
            self.done += 1
            if not exact(answer, tokens):
                self.wrong.append(answer)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_engines_change_both_ways_and_every_answer_is_exact(running: Fleet):
    made, (first, _, third, _) = running, running.engines
    before = epoch(first), epoch(third)
    with Load(made) as load:
        wait_for(lambda: load.done >= 6, 60, made.logs)
        for engine, now in ((first, "decode"), (third, "prefill")):
            assert role(engine, now).status_code == 202
            wait_for(lambda engine=engine, now=now: has(engine, now), 60, made.logs)
            came = len(engine.behave()["asked"])
            wait_for(lambda engine=engine, came=came: len(engine.behave()["asked"]) >= came + 6, 60, made.logs)
    assert load.wrong == []
    assert load.done >= 12
    assert epoch(first) > before[0]
    assert epoch(third) > before[1]
    assert (first.behave()["switched"], third.behave()["switched"]) == (["decode"], ["prefill"])
    assert value(scrape(first.adapter_url), "kvferry_role_changes_total", outcome="done") == 1


def test_an_engine_that_refuses_keeps_its_role_and_works_on(running: Fleet):
    made, engine = running, running.engines[1]
    engine.behave(switch="full")
    began = epoch(engine)
    refused = role(engine, "decode")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_kept")
    assert "insufficient decode CUDA graph headroom" in refused.text
    again = role(engine, "decode")
    assert "a change failed" in again.text, "the node must not be emptied again and again"
    engine.behave(switch="on")
    wait_for(lambda: has(engine, "prefill"), 10, made.logs)
    assert epoch(engine) == began
    came = len(engine.behave()["asked"])
    wait_for(lambda: not asked(made).error and len(engine.behave()["asked"]) > came, 30, made.logs)


def test_an_engine_that_breaks_ends_its_node_and_the_others_serve(running: Fleet):
    made, engine = running, running.engines[3]
    engine.behave(switch="breaks")
    wait_for(lambda: sum(has(each, "decode") for each in made.engines) == 2, 30, made.logs)
    role(engine, "prefill")
    assert engine.adapter.popen.wait(10) == 1
    tokens = prompt(next(SEEDS), LONG)
    wait_for(lambda: exact(ask(made, tokens, COUNT), tokens), 30, made.logs)


def test_the_last_node_of_a_role_keeps_it(running: Fleet):
    last = running.engines[0]
    assert has(last, "decode")
    refused = role(last, "prefill")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_kept")
    assert "it is the last decode node that is ready" in refused.text
