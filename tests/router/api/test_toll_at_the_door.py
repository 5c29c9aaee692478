"""Tenants and addresses whose requests come to nothing wait for their refusals; nobody else waits for anything."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.runtime import rejection_throttle
from kvferry.runtime.rejection_throttle import RejectionThrottle
from tests.api_parts import Api, FakeCluster, says
from tests.router.api.test_tenants import ask, keys_file
from tests.waiting import until

WRONG = {"max_tokens": -1}
SOON_S = 0.5


@pytest.fixture(autouse=True)
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refusal costs what a long one does: two take the credit, each of the next waits a second more."""
    monkeypatch.setattr(rejection_throttle, "MIN_COST_S", rejection_throttle.MAX_COST_S)


async def refused_often(api: Api, name: str, times: int = 4) -> list[asyncio.Task[httpx.Response]]:
    """The last of these wait."""
    assert [(await ask(api, name, **WRONG)).status_code for _ in range(2)] == [400, 400]
    return [asyncio.create_task(ask(api, name, **WRONG)) for _ in range(times)]


async def timed(asked: Any) -> tuple[int, float]:
    began = time.monotonic()
    answer = await asked
    return answer.status_code, time.monotonic() - began


async def ended(tasks: list[asyncio.Task[httpx.Response]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_refusals_of_a_tenant_that_has_had_too_many_wait_and_nothing_else_does(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), throttle=RejectionThrottle(), api_keys=keys_file(tmp_path))
    assert (await ask(api, "b")).status_code == 200
    waiting = await refused_often(api, "a")
    await asyncio.sleep(SOON_S)
    assert sum(task.done() for task in waiting) < len(waiting)
    for asked, status in ((ask(api, "a"), 200), (ask(api, "b"), 200), (ask(api, "b", **WRONG), 400)):
        found, took = await timed(asked)
        assert (found, took < SOON_S) == (status, True)
    await until(lambda: api.sample("kvferry_requests_inflight") == 0)
    await ended(waiting)


async def test_a_wrong_key_is_paid_for_by_its_address(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), throttle=RejectionThrottle(), api_keys=keys_file(tmp_path))
    assert (await ask(api, "a")).status_code == 200
    for _ in range(2):
        assert (await ask(api, "nobody")).status_code == 401
    waiting = [asyncio.create_task(ask(api, "nobody")) for _ in range(3)]
    await asyncio.sleep(SOON_S)
    assert not all(task.done() for task in waiting)
    status, took = await timed(ask(api, "a", **WRONG))
    assert (status, took < SOON_S) == (400, True)
    await ended(waiting)


async def test_where_nobody_is_served_refusals_are_told_at_once(tmp_path: Path) -> None:
    api = Api(FakeCluster(says("x")), throttle=RejectionThrottle(), api_keys=keys_file(tmp_path))
    began = time.monotonic()
    for _ in range(20):
        assert (await ask(api, "a", **WRONG)).status_code == 400
    assert time.monotonic() - began < 20 * SOON_S


async def test_a_refusal_that_waits_still_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_throttle, "MAX_DELAY_S", 0.3)
    api = Api(FakeCluster(says("x")), throttle=RejectionThrottle(), api_keys=keys_file(tmp_path))
    assert (await ask(api, "b")).status_code == 200
    answers = await asyncio.gather(*await refused_often(api, "a"))
    assert {answer.status_code for answer in answers} == {400}
    assert all("max_tokens" in answer.json()["error"]["message"] for answer in answers)
