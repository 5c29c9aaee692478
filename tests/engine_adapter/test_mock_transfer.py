"""The mock's transfers are as dangerous as NIXL's: a test with it would notice a reference that is misused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.protocol.sampling import SamplingParams
from kvferry.runtime.http import bind, make_server
from tests.engine_adapter.mock_vllm import Behaviour, app_of
from tests.waiting import until

PROMPT = tuple(range(1000, 1040))
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@asynccontextmanager
async def engine(**behaviour: Any) -> AsyncIterator[VllmEngine]:
    socket = bind("127.0.0.1", 0)
    port = socket.getsockname()[1]
    server = make_server(app_of(Behaviour(**{"transfer": True, **behaviour}), port), {})
    task = asyncio.create_task(server.serve(sockets=[socket]))
    await until(lambda: server.started)
    client = VllmEngine(EngineHttp(f"http://127.0.0.1:{port}"))
    try:
        yield client
    finally:
        await client.close()
        server.should_exit = True
        await task


async def tokens(of: VllmEngine, reference: str = "", prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    deltas: list[EngineDelta] = []
    await of.generate(EngineCall("d", prompt, PARAMS, reference=reference), deltas.append)
    return tuple(token for delta in deltas for token in delta.token_ids)


async def prefilled(of: VllmEngine, number: int = 0) -> str:
    return (await of.prefill(EngineCall(f"p-{number}", PROMPT, PARAMS))).reference


async def test_a_reference_gives_the_right_tokens_once() -> None:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(engine()) for _ in range(2)]
        right, reference = await tokens(second), await prefilled(first)
        assert await tokens(second, reference) == right
        again = await tokens(second, reference)
        assert again[0] == right[0]
        assert again[1] != right[1]
        other = await prefilled(first, 1)
        assert (await tokens(second, other, PROMPT[::-1]))[0] != (await tokens(second, "", PROMPT[::-1]))[0]


async def test_a_reference_whose_lease_is_over_gives_wrong_tokens() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(engine(kv_lease=0.05))
        second = await stack.enter_async_context(engine())
        right, reference = await tokens(second), await prefilled(first)
        await asyncio.sleep(0.1)
        assert (await tokens(second, reference))[0] != right[0]


async def test_a_prompt_one_block_longer_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        raise SystemError

    monkeypatch.setattr("tests.engine_adapter.mock_transfer.os._exit", end)
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(engine()) for _ in range(2)]
        with pytest.raises(Exception, match="engine"):
            await tokens(second, await prefilled(first), (*PROMPT, *range(20)))
    assert ended == [86]


async def test_an_engine_without_a_connector_gives_no_reference() -> None:
    async with engine(transfer=False, events=False) as one:
        assert (await one.facts()).kv_transfer == ""
        assert await prefilled(one) == ""
    async with engine(events=False) as one:
        assert (await one.facts()).kv_transfer == "nixl"
