"""Redis under a name: looked up anew for each connection, and found in the end where lookups take too long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import RedisError

from kvferry.cluster_state.name_lookups import NameLookups
from kvferry.cluster_state.redis_client import close, connected
from tests.redis_servers import RedisServer, redis_server

NAME = "redis.example"
TIMEOUT_S = 0.2


@pytest.fixture(scope="module")
def server() -> Any:
    with redis_server() as made:
        yield made


@pytest.fixture
async def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A name service that takes so long for the one name and then finds these addresses: the list of its lookups."""
    known, looked_up = asyncio.get_running_loop().getaddrinfo, list[str]()

    def answers(delay_s: float, *addresses: str) -> list[str]:
        async def getaddrinfo(host: str, port: int, **options: Any) -> Any:
            if host != NAME:
                return await known(host, port, **options)
            looked_up.append(host)
            await asyncio.sleep(delay_s)
            if not addresses:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return looked_up

    return answers


async def test_a_lookup_that_takes_longer_than_a_connect_is_used_when_it_ends(
    named: Callable[..., list[str]], server: RedisServer
) -> None:
    looked_up = named(6 * TIMEOUT_S, "127.0.0.1")
    client = connected(f"redis://{NAME}:{server.port}", TIMEOUT_S)
    for _ in range(3):
        with pytest.raises(RedisError):
            await client.ping()
    await asyncio.sleep(6 * TIMEOUT_S)
    assert await client.ping()
    assert await asyncio.gather(*(client.ping() for _ in range(8)))
    assert looked_up == [NAME], "one lookup served all"
    await close(client)


async def test_a_lookup_in_time_is_made_anew_for_each_connection(
    named: Callable[..., list[str]], server: RedisServer
) -> None:
    looked_up = named(0.0, "127.0.0.1")
    client = connected(f"redis://{NAME}:{server.port}", 2.0)
    for _ in range(3):
        assert await client.ping()
        await client.connection_pool.disconnect()
    assert len(looked_up) == 3
    await close(client)


async def test_the_next_address_is_tried_where_one_refuses(
    named: Callable[..., list[str]], server: RedisServer
) -> None:
    named(0.0, "127.0.0.9", "127.0.0.1")
    client = connected(f"redis://{NAME}:{server.port}", 2.0)
    assert await client.ping()
    await close(client)


async def test_a_name_that_is_not_known_is_looked_up_again(named: Callable[..., list[str]]) -> None:
    looked_up, lookups = named(0.0), NameLookups()
    for _ in range(2):
        with pytest.raises(socket.gaierror):
            await lookups.addresses(NAME, 1)
    assert len(looked_up) == 2
    assert await lookups.addresses("::1", 1) == ["::1"]
