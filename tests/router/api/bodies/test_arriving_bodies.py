"""Bodies that arrive and are not finished hold a bounded amount of memory, of all clients and of each tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from kvferry.router.api.bodies.reader import MAX_PER_SOURCE, BodyReader
from kvferry.router.request_context import CALL, RequestContext
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, error_of, says

PIECE = b" " * 1_045_000


async def held(api: Api, key: str, until: asyncio.Event, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Requests whose bodies have arrived but for their end."""

    async def body() -> AsyncIterator[bytes]:
        yield PIECE
        await until.wait()
        yield b'{"prompt": "a", "max_tokens": 1}'

    headers = {"authorization": f"Bearer {key}"}
    asked = [
        asyncio.create_task(api.http.post("/v1/completions", content=body(), headers=headers)) for _ in range(count)
    ]
    await asyncio.sleep(0.2)
    return asked


@pytest.mark.parametrize("keys", [True, False])
async def test_unfinished_bodies(tmp_path: Path, keys: bool) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(name, name) for name in "abc"))
    settings: dict[str, Any] = {"api_keys": str(file)} if keys else {}
    api = Api(FakeCluster(says("Yes.")), max_body_mib=1, **settings)
    end = asyncio.Event()
    first = await held(api, "a", end, MAX_PER_SOURCE)
    (beyond,) = await held(api, "a", end, 1)
    assert error_of(await beyond)["code"] == "overloaded", "of one source"
    if keys:
        others = await held(api, "b", end, MAX_PER_SOURCE)
        (all_too_many,) = await held(api, "c", end, 1)
        assert (await all_too_many).status_code == 429, "of all together"
        first += others
    small = {"prompt": "a " * (30_000 if keys else 1), "truncate_prompt_tokens": 1}
    answer = await api.http.post("/v1/completions", json=small, headers={"authorization": "Bearer c"})
    assert answer.status_code == 200, "little is read as ever"
    end.set()
    assert {answer.status_code for answer in await asyncio.gather(*first)} == {200}
    (after,) = await held(api, "a", end, 1)
    assert (await after).status_code == 200


@pytest.mark.parametrize("keys", [True, False])
async def test_arriving_bodies_of_one_source_do_not_delay_those_of_others(keys: bool) -> None:
    reader, parts = BodyReader(2**30), Counter[str]()

    async def read(source: str, count: int) -> bytes:
        async def receive() -> Message:
            parts[source] += 1
            return {"type": "http.request", "body": b" " * 2**16, "more_body": parts[source] != count}

        call = RequestContext("r", 0.0, 1.0, tenant=source if keys else "")
        return await reader.take({"headers": [], "client": (source, 1), CALL: call}, receive)

    crowd = [asyncio.create_task(read("a", 0)) for _ in range(64)]
    await asyncio.sleep(0.02)
    before = parts["a"]
    assert len(await read("b", 8)) == 2**19
    beside = parts["a"] - before
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert beside < 150, "one queue for both would pass 1000"
