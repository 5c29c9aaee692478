"""What only the real server can show: outages, frozen servers, foreign data, keys."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace

import pytest

from kvferry.cluster_state import lease_seal
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import Announced
from kvferry.protocol.errors import ConfigError, RegistryUnavailable, from_body
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.lease import IncompatibleLease, NodeLease

HASHES = [bytes([i]) * 16 for i in range(20)]
ROWS = rows_of(HASHES)
LEASE = NodeLease("a", "decode", 5, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)


@pytest.fixture
async def redis_store(valkey_url):
    store = RedisStore(valkey_url, "test", timeout_s=1.0, lookup_s=2.0)
    yield store
    await store.close()


async def _calls(store: RedisStore):
    yield store.ping()
    yield store.announce(LEASE)
    yield store.withdraw("a", 5)
    yield store.nodes()
    yield store.publish("a", 5, ROWS, ROWS)
    yield store.refresh("a", 5, ROWS)
    yield store.longest_prefix(HASHES, {"a": 5})


async def test_every_error_is_registry_unavailable_and_a_restart_is_survived(valkey, redis_store):
    await redis_store.publish("a", 5, ROWS, [])
    valkey.terminate()
    async for call in _calls(redis_store):
        with pytest.raises(RegistryUnavailable) as caught:
            await call
    assert isinstance(from_body(caught.value.body()), RegistryUnavailable)
    valkey.start()
    assert await redis_store.longest_prefix(HASHES, {"a": 5}) == {}
    await redis_store.publish("a", 5, ROWS, [])
    assert await redis_store.longest_prefix(HASHES, {"a": 5}) == {"a": 20}


async def test_a_pooled_connection_to_a_restarted_server_is_not_an_error(valkey, redis_store):
    await redis_store.announce(LEASE)
    valkey.terminate()
    valkey.start()
    assert await redis_store.announce(LEASE) is Announced.CREATED


async def test_a_frozen_server_costs_bounded_time(valkey, valkey_url, redis_store):
    hasty = RedisStore(valkey_url, "test", lookup_s=0.1)
    await redis_store.publish("a", 5, ROWS, [])
    pid = valkey._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable):
            await hasty.longest_prefix(HASHES, {"a": 5})
        assert time.monotonic() - began < 1
        with pytest.raises(RegistryUnavailable):
            await redis_store.announce(LEASE)
        assert time.monotonic() - began < 5
    finally:
        os.kill(pid, signal.SIGCONT)
        await hasty.close()
    assert await redis_store.longest_prefix(HASHES, {"a": 5}) == {"a": 20}


async def test_a_lookup_can_be_cancelled_at_any_moment(redis_store):
    """Before Python 3.12 `asyncio.wait_for`, under which the client library writes, swallows a cancellation that comes
    as it ends: one in a dozen lookups then went on as if it had not been asked to stop."""
    await redis_store.publish("a", 5, ROWS, [])
    await redis_store.longest_prefix(HASHES, {"a": 5})
    for turns in range(40):
        asked = [asyncio.create_task(_request(redis_store)) for _ in range(20)]
        for _ in range(turns):
            await asyncio.sleep(0)
        told = [task for task in asked if task.cancel()]
        ended = await asyncio.gather(*told, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), (turns, ended)
    assert await redis_store.longest_prefix(HASHES, {"a": 5}) == {"a": 20}


async def _request(store):
    """A request: it looks up, and then does something that takes long."""
    with contextlib.suppress(RegistryUnavailable):
        await store.longest_prefix(HASHES, {"a": 5})
    await asyncio.sleep(5)


async def test_a_full_or_spoilt_server_is_unavailable_not_a_crash(valkey, redis_store):
    with valkey.client() as client:
        client.set("kvferry:test:nodes", "not a hash")
    with pytest.raises(RegistryUnavailable):
        await redis_store.nodes()


async def test_leases_of_another_version_are_skipped_and_told_once(valkey, redis_store, caplog):
    await redis_store.announce(LEASE)
    with valkey.client() as client:
        for node_id, value in (("b", b"\xc1garbage"), ("c", b"\x01")):
            client.hset("kvferry:test:nodes", node_id, 1)
            client.set(f"kvferry:test:node:{node_id}", value)
    for _ in range(3):
        assert await redis_store.nodes() == [LEASE]
    assert len(caplog.records) == 1


async def test_keys_have_an_end_and_clusters_are_apart(valkey, valkey_url, redis_store):
    await redis_store.announce(LEASE)
    await redis_store.publish("a", 5, ROWS, [])
    with valkey.client() as client:
        assert 3000 < client.pttl("kvferry:test:node:a") <= 5000
        rows = [b"kvferry:test:b:" + HASHES[0], *(b"kvferry:test:g:" + HASHES[at][:8] for at in (1, 17))]
        assert all(3_500_000 < client.pttl(key) <= 3_600_000 for key in rows)
        assert client.dbsize() == 2 + len(rows)
        await redis_store.publish("a", 5, [], ROWS)
        await redis_store.withdraw("a", 5)
        assert client.dbsize() == 0
    other = RedisStore(valkey_url, "other")
    await other.announce(LEASE)
    assert await redis_store.nodes() == []
    await other.close()


async def test_members_without_a_lease_are_dropped_on_reading(valkey, redis_store):
    await redis_store.announce(LEASE)
    await redis_store.announce(replace(LEASE, node_id="b"))
    with valkey.client() as client:
        client.delete("kvferry:test:node:b")
        assert [lease.node_id for lease in await redis_store.nodes()] == ["a"]
        assert client.hkeys("kvferry:test:nodes") == [b"a"]


async def test_lookup_reads_few_rows(valkey, redis_store):
    hashes = [i.to_bytes(16, "little") for i in range(256)]
    await redis_store.publish("a", 5, rows_of(hashes[:200]), [])
    await redis_store.longest_prefix(hashes, {"a": 5})
    with valkey.client() as client:
        client.config_resetstat()
        assert await redis_store.longest_prefix(hashes, {"a": 5, "b": 1}) == {"a": 200}
        stats = client.info("commandstats")
        assert stats["cmdstat_evalsha"]["calls"] == 1
        assert stats["cmdstat_hmget"]["calls"] <= 2 * 8 + 2
        for i in range(50):
            await redis_store.publish(f"n{i}", 5, rows_of(hashes[:200]), [])
        client.config_resetstat()
        asked = {f"n{i}": 5 for i in range(50)}
        assert await redis_store.longest_prefix(hashes, asked) == dict.fromkeys(asked, 200)
        assert client.info("commandstats")["cmdstat_hmget"]["calls"] <= 2 * 8 + 2


async def test_a_hundred_nodes_with_ends_of_their_own(redis_store):
    hashes = [i.to_bytes(16, "little") for i in range(300)]
    ends = {f"n{i}": (i * 37) % 301 for i in range(100)}
    for node_id, end in ends.items():
        await redis_store.publish(node_id, 5, rows_of(hashes[:end]), [])
    found = await redis_store.longest_prefix(hashes, dict.fromkeys(ends, 5))
    assert found == {node_id: end for node_id, end in ends.items() if end}


def test_a_bad_url_is_a_config_error():
    with pytest.raises(ConfigError, match="redis_url"):
        RedisStore("file:///tmp/x", "test")


async def test_nodes_of_another_wire_version_are_told_apart_and_not_among_the_nodes(redis_store, monkeypatch):
    await redis_store.announce(LEASE)
    with monkeypatch.context() as later:
        later.setattr(lease_seal, "WIRE_VERSION", WIRE_VERSION + 1)
        await redis_store.announce(replace(LEASE, node_id="b", role="prefill"))
    assert await redis_store.nodes() == [LEASE]
    told = f"speaks wire version {WIRE_VERSION + 1} and this process {WIRE_VERSION}"
    assert redis_store.incompatible == (IncompatibleLease("b", "prefill", told),)
    await redis_store.withdraw("b", 5)
    await redis_store.nodes()
    assert redis_store.incompatible == ()
