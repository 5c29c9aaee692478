"""A chat template that takes all memory or time: its request gets a 400 in its API's shape, and no other one waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.app import create_app
from kvferry.router.api.served_models import ServedModels, pool_of
from kvferry.router.batch.batches import Batches
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.render_frames import DEADLINE_S, MEMORY
from tests.api_parts import MESSAGES, FakeCluster, demo_text, error_of, says, unwatched
from tests.hostile_templates import BOMBS, template_in_child
from tests.memory_responses import MemoryResponses

SPIN = "{% for a in range(3500) %}{{ range(100000) | list | sum }}{% endfor %}"
SOURCE = (
    "{% set said = messages[-1].content %}"
    "{% if said == 'memory' %}" + BOMBS["printed in a loop"] + "{% elif said == 'time' %}" + SPIN
    + "{% elif said == 'long' %}"
    "{% for a in range(90000) %}x{{ a * 7919 }} {% endfor %}{% else %}{{ said }}{% endif %}"
)  # fmt: skip


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    settings, metrics = RouterSettings(), RouterMetrics()
    tenants, text = TenantRegistry(settings), replace(demo_text(), template=template_in_child(SOURCE))
    pools = ServedModels(pool_of(text, FakeCluster(says("fine")), metrics, settings, tenants))
    app = create_app(settings, pools, metrics, tenants, MemoryResponses(), Batches(settings), unwatched(metrics))
    async with aclosing(pools), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as made:
        yield made


def chat(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", chat("memory"), "messages"),
        ("/v1/chat/completions", {**chat("memory"), "stream": True}, "messages"),
        ("/v1/responses", {"input": "memory"}, "input"),
        ("/v1/responses", {"input": "memory", "truncation": "auto"}, "input"),
        ("/tokenize", chat("memory"), "messages"),
    ],
)
async def test_a_template_that_takes_all_memory_is_the_request_s_error(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    limit = f"the chat template takes more than {MEMORY >> 20} MiB of memory for these {field}"
    assert error["message"].startswith(limit)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_messages_api_says_so_in_its_own_shape(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={**chat("memory"), "model": "SmolLM2-135M-Instruct", "max_tokens": 5})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "MiB of memory" in response.json()["error"]["message"]


async def test_others_are_answered_while_a_template_takes_all_time(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/chat/completions", json=chat("hi"))).status_code == 200
    began = time.monotonic()
    slow = asyncio.create_task(http.post("/v1/messages/count_tokens", json={**chat("time"), "model": "smollm2"}))
    bomb = asyncio.create_task(http.post("/v1/chat/completions", json=chat("time")))
    await asyncio.sleep(0.3)
    for body in ({"prompt": "Once"}, {"prompt": [1, 2, 3]}):
        assert (await asyncio.wait_for(http.post("/v1/completions", json=body), 1)).status_code == 200
    refused = await bomb
    assert refused.status_code == 400
    assert f"takes more than {DEADLINE_S:g} s" in error_of(refused)["message"]
    assert time.monotonic() - began < 2 * DEADLINE_S + 2
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_a_long_text_of_a_short_request_is_encoded_beside_the_event_loop(http: httpx.AsyncClient) -> None:
    """It has ninety thousand different words, more than the context can hold."""
    await http.post("/v1/chat/completions", json=chat("hi"))
    task = asyncio.create_task(http.post("/v1/chat/completions", json=chat("long")))
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, (now := time.monotonic()) - last), now
    assert (await task).json()["error"]["code"] == "context_length_exceeded"
    assert longest < 0.5


async def test_a_chat_is_answered_as_ever(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert response.json()["choices"][0]["message"]["content"] == "fine"
