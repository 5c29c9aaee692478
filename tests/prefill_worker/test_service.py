"""The prefill role over HTTP, with an engine that is a list of what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from kvferry.engine.events import Generated
from kvferry.engine.request import key_of
from kvferry.kv_transfer.dock import Dock
from kvferry.prefill_worker.service import PrefillService
from kvferry.protocol.messages import FirstToken, Job, PrefillRequest, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import FrameReader, pack
from kvferry.protocol.work import Generate
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import make_app
from kvferry.worker.pool_memory import PoolMemory
from kvferry.worker.tier_factory import OpenTiers
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.waiting import until

TEXT_ALONE = SimpleNamespace(media=SimpleNamespace(encoder=None))
"""What the endpoints ask of a node's engine."""


class Engine:
    """Collects the jobs that are added."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.urgent: list[bool] = []

    def submit(self, call: Callable[[Any], None], *, urgent: bool = False) -> None:
        self.urgent.append(urgent)
        call(self)

    def add(self, job: Job, **_: Any) -> None:
        self.jobs.append(job)

    def cancel(self, request_id: str, attempt: int) -> None: ...


def service_on(app: FastAPI, engine: Engine) -> PrefillService:
    base: Any = SimpleNamespace(
        settings=SimpleNamespace(role="prefill", grant_timeout=30.0, kv_events_config=""),
        parts=SimpleNamespace(kv=torch.zeros(2, 4), fingerprint="f", media=None, engine=TEXT_ALONE),
        epoch=1,
        metrics=WorkerMetrics("prefill"),
        app=app,
        engine=engine,
        dock=Dock(LoopbackNetwork().link("here:1"), PoolMemory(torch.zeros(2, 4))),
        require=lambda role: None,
        tiers=OpenTiers(),
        call_soon=lambda call: call(),
    )
    return PrefillService(base)


def job(delivered: int, max_tokens: int) -> Job:
    return Job("r", 1, tuple(range(10 + delivered)), 10, Generate(SamplingParams(max_tokens=max_tokens)), "router")


async def post(app: FastAPI, message: PrefillRequest) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        return await client.post("/attempts/prefill", content=pack(message))


async def test_the_last_token_of_a_retried_request_needs_no_decode_node() -> None:
    engine, app = Engine(), make_app(lambda: (200, {}), lambda: "")
    service, last = service_on(app, engine), job(delivered=4, max_tokens=5)
    answer = asyncio.create_task(post(app, PrefillRequest(last)))
    await until(lambda: engine.jobs)
    delta = TokenDelta("r", 1, 4, (7,), finish_reason="length")
    service.to_routers([Generated(key_of(last), "router", delta)])
    response = await answer
    assert response.status_code == 200
    (first,) = FrameReader().feed(response.content)
    assert first == FirstToken(delta, 0.0, 0.0)
    assert not service.busy()


async def test_a_newcomers_prompt_is_urgent() -> None:
    engine, app = Engine(), make_app(lambda: (200, {}), lambda: "")
    service = service_on(app, engine)
    for number, newcomer in enumerate((False, True)):
        asked = replace(job(delivered=4, max_tokens=5), request_id=f"r{number}", newcomer=newcomer)
        answer = asyncio.create_task(post(app, PrefillRequest(asked)))
        await until(lambda number=number: len(engine.jobs) > number)  # type: ignore[misc]
        delta = TokenDelta(asked.request_id, asked.attempt, 4, (7,), finish_reason="length")
        service.to_routers([Generated(key_of(asked), "router", delta)])
        await answer
    assert engine.urgent == [False, True]


async def test_an_account_of_another_prompt_is_counted_and_its_token_delivered() -> None:
    engine, app = Engine(), make_app(lambda: (200, {}), lambda: "")
    service, last = service_on(app, engine), job(delivered=0, max_tokens=1)
    answer = asyncio.create_task(post(app, PrefillRequest(last)))
    await until(lambda: engine.jobs)
    delta = TokenDelta("r", 1, 0, (7,), finish_reason="length", reuse=Reuse(9, computed=9))
    service.to_routers([Generated(key_of(last), "router", delta)])
    (first,) = FrameReader().feed((await answer).content)
    assert first.delta == delta
    assert service._base.metrics.account_violations._value.get() == 1


@pytest.mark.parametrize(("delivered", "max_tokens"), [(0, 2), (4, 6)])
async def test_without_a_decode_node_there_is_one_token_only(delivered: int, max_tokens: int) -> None:
    engine, app = Engine(), make_app(lambda: (200, {}), lambda: "")
    service = service_on(app, engine)
    response = await post(app, PrefillRequest(job(delivered, max_tokens)))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert not engine.jobs
    assert not service.busy()
