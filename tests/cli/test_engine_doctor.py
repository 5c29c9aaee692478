"""What `kvferry doctor` says about engines of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from kvferry.cli.doctor import all_checks
from kvferry.cli.engine_doctor import check_engine, engine_checks
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings
from kvferry.runtime.http import bind, make_server
from tests.engine_adapter import mock_openai, mock_sglang
from tests.engine_adapter.mock_vllm import Behaviour, app_of
from tests.redis_servers import free_ports
from tests.waiting import until


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    socket = bind("127.0.0.1", 0)
    server = make_server(app, {})
    task = asyncio.create_task(server.serve(sockets=[socket]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def served(**behaviour: Any) -> AsyncIterator[str]:
    async with serving(app_of(Behaviour(**behaviour))) as url:
        yield url


SETTINGS = ServeSettings(engine="vllm")


async def test_an_engine_without_events_is_named_with_the_flag() -> None:
    async with served(events=False) as url:
        found = await check_engine(SETTINGS, url)
    assert found.level == "warn"
    assert "vllm 0.32.0 with /models/toy, blocks of 16 tokens" in found.found
    assert "publishes no KV events" in found.found
    assert "--kv-events-config" in found.remedy
    assert "--enable-prompt-tokens-details" not in found.remedy


async def test_missing_token_details_are_named_with_the_flag() -> None:
    async with served(details=False) as url:
        found = await check_engine(SETTINGS, url)
    assert "--enable-prompt-tokens-details" in found.remedy


async def test_an_engine_that_takes_no_tokens_fails_with_the_flag() -> None:
    async with served(fault="refuse") as url:
        found = await check_engine(SETTINGS, url)
    assert found.level == "fail"
    assert "--enable-scale-out" in found.remedy


async def test_an_engine_that_embeds_is_well() -> None:
    async with served(pools="embed") as url:
        found = await check_engine(SETTINGS, url)
    assert (found.level, "can embed" in found.found) == ("ok", True)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_half_an_engine_needs_an_adapter_of_its_role(mode: str) -> None:
    async with serving(mock_sglang.app_of(mock_sglang.Server(mock_sglang.Behaviour(mode=mode), 8998))) as url:
        found = await check_engine(ServeSettings(engine="sglang"), url)
    assert (found.level, f"--role {mode}" in found.remedy) == ("warn", True)


async def test_an_engine_that_is_not_there_is_a_failure() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match="start it, or correct the URL"):
        await check_engine(SETTINGS, f"http://127.0.0.1:{port}")


def test_each_attached_engine_has_a_line() -> None:
    first, second = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    settings = ServeSettings(engine="vllm", attach=(first, second), port=0)
    results = list(all_checks(settings, engine_checks(settings)))
    assert [result.name for result in results] == ["redis", "port", f"engine {first}", f"engine {second}"]
    assert [result.level for result in results[2:]] == ["fail", "fail"]


async def test_an_engine_that_transfers_no_blocks_is_named_where_prompts_are_computed_apart() -> None:
    wanted = ServeSettings(engine="vllm", prefill_engines=1)
    async with served() as url:
        found = await check_engine(wanted, url)
        alone = await check_engine(SETTINGS, url)
    assert found.level == "warn"
    assert "--kv-transfer-config" in found.remedy
    assert "recompute" in found.remedy
    assert alone.level == "ok"
    async with served(transfer=True) as url:
        found = await check_engine(wanted, url)
    assert found.level == "ok"
    assert "transfers KV blocks by nixl" in found.found


@asynccontextmanager
async def openai(**behaviour: Any) -> AsyncIterator[str]:
    async with serving(mock_openai.app_of(mock_openai.Behaviour(**behaviour))) as url:
        yield url


OPENAI = ServeSettings(engine="openai", model=("smollm2",))


async def test_an_openai_server_that_tells_token_ids_is_well() -> None:
    async with openai() as url:
        found = await check_engine(OPENAI, url)
    assert found.level == "ok"
    assert "openai fp_1 with toy" in found.found


async def test_an_openai_server_of_text_is_told_with_what_is_lost() -> None:
    async with openai(form="text", details=False) as url:
        found = await check_engine(OPENAI, url)
    assert found.level == "warn"
    assert "sends only text" in found.found
    assert "return_token_ids and prompt_tokens_details" in found.remedy


async def test_an_openai_server_that_takes_no_token_ids_fails() -> None:
    async with openai(takes_ids=False) as url:
        with pytest.raises(ConfigError, match="refuses token ids as the prompt"):
            await check_engine(OPENAI, url)
