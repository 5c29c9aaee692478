"""Calls of the journals' scripts that the store runs late, after a node had passed them on: they change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from kvferry.cluster_state.journal_calls import JournalScripts, Values
from kvferry.cluster_state.journals import HEAD, Append, AppendOutcome
from kvferry.cluster_state.redis_journals import APPENDS_PER_CALL, RedisJournals
from kvferry.cluster_state.redis_router_leases import RedisRouterLeases

MOST_BYTES = 8 * 2**20
"""Longest call, in bytes."""
Args = Sequence[str | bytes | int]


class Recorded:
    """Scripts of the real store, which keep their calls to run them once more."""

    def __init__(self, scripts: JournalScripts) -> None:
        self._scripts = scripts
        self.calls: list[tuple[str, Args]] = []

    async def run(self, name: str, args: Args) -> Values:
        self.calls.append((name, args))
        return await self._scripts.run(name, args)

    async def run_late(self, name: str, index: int = -1) -> Values:
        """Run a call of this script as a frozen connection does that delivers it now."""
        return await self._scripts.run(*[call for call in self.calls if call[0] == name][index])

    async def close(self) -> None:
        """Do nothing."""


class Router:
    """Router with journals on the real store."""

    def __init__(self, url: str, name: str) -> None:
        self.name, self.journals = name, RedisJournals(url, "test", share=10_000)
        self.scripts = Recorded(self.journals._scripts)
        self.journals._scripts = self.scripts  # type: ignore[assignment]

    async def claim(self, *, by_force: bool = False) -> bool:
        return await self.journals.claim("ann", "a", self.name, ttl_s=9, by_force=by_force)

    async def release(self) -> bool:
        return await self.journals.release("ann", "a", self.name, ttl_s=9)

    async def append(self, number: int, entry: bytes) -> AppendOutcome:
        (outcome,) = await self.journals.append(self.name, [Append("ann", "a", number, entry, 9)])
        return outcome

    async def owner(self) -> str | None:
        found = await self.journals.read("ann", "a")
        return None if found is None else found.owner


@pytest.fixture
async def routers(valkey_url: str) -> AsyncIterator[tuple[Router, Router]]:
    """Two routers; the first one has opened the journal."""
    both = Router(valkey_url, "r1"), Router(valkey_url, "r2")
    await both[0].append(HEAD, b"head")
    yield both
    for each in both:
        await each.journals.close()


Pair = tuple[Router, Router]


async def test_a_late_claim_owns_no_journal_that_was_released(routers: Pair) -> None:
    """A live router owned a journal that it did not know: other routers followed it until it expired."""
    first, second = routers
    await first.release()
    assert await second.claim()
    assert await second.release()
    await second.scripts.run_late("claim")
    assert await first.owner() == ""


async def test_a_late_claim_that_was_refused_is_refused_again(routers: Pair, valkey_url: str) -> None:
    """The owner lived then, and is dead now."""
    leases = RedisRouterLeases(valkey_url, "test")
    await leases.renew("r1")
    assert not await routers[1].claim()
    await leases.withdraw("r1")
    assert await routers[1].scripts.run_late("claim") == (b"0",)
    assert await routers[1].owner() == "r1"
    await leases.close()


async def test_a_late_claim_by_force_takes_no_journal_back(routers: Pair) -> None:
    first, second = routers
    assert await first.claim()
    assert await second.claim(by_force=True)
    assert await first.claim(by_force=True)
    assert await second.scripts.run_late("claim") == (b"0",)
    assert await first.owner() == "r1"


async def test_a_call_that_is_repeated_at_once_has_the_same_outcome(routers: Pair) -> None:
    first, second = routers
    await first.release()
    assert await second.claim()
    assert await second.scripts.run_late("claim") == (b"1",)
    assert await second.append(0, b"one") is AppendOutcome.STORED
    assert await second.scripts.run_late("append") == (b"1", b"2"), "the number of its first append"


async def test_a_late_release_takes_no_journal_from_its_owner(routers: Pair) -> None:
    """It was claimed again meanwhile, and its stream ended as if another router continued it."""
    (first, _) = routers
    assert await first.release()
    assert await first.claim()
    await first.scripts.run_late("release")
    assert await first.owner() == "r1"
    assert await first.append(0, b"one") is AppendOutcome.STORED


async def test_a_late_drop_deletes_no_journal_that_was_claimed_again(routers: Pair) -> None:
    """The store had not run it, and the client came back."""
    first, _ = routers
    await first.journals.drop("ann", "missing", "r1")
    name, args = first.scripts.calls[-1]
    first.scripts.calls[-1] = name, [args[0], "a", *args[2:]]
    assert await first.claim()
    assert await first.scripts.run_late("release") == (b"0",)
    assert await first.owner() == "r1"


async def test_a_late_first_append_brings_no_deleted_journal_back(routers: Pair) -> None:
    """It had a head and no entries: a client that came back got an empty stream."""
    first, _ = routers
    assert await first.append(0, b"one") is AppendOutcome.STORED
    assert await first.journals.drop("ann", "a", "r1")
    for call in (0, 1):
        assert await first.scripts.run_late("append", call) == (b"2", b"1")
    assert await first.owner() is None


async def test_a_late_append_of_the_last_call_brings_no_deleted_journal_back(routers: Pair) -> None:
    first, _ = routers
    assert await first.journals.drop("ann", "a", "r1")
    assert await first.scripts.run_late("append") == (b"2", b"1")
    assert await first.owner() is None


async def test_a_late_append_overwrites_no_entry_of_another_router(routers: Pair) -> None:
    first, second = routers
    assert await first.append(0, b"old") is AppendOutcome.STORED
    assert await second.claim(by_force=True)
    assert await second.append(0, b"new") is AppendOutcome.STORED
    assert await first.claim(by_force=True)
    assert await first.scripts.run_late("append") == (b"1", b"1")
    found = await first.journals.read("ann", "a")
    assert found is not None
    assert found.entries == [b"new"]


async def test_one_call_has_a_bounded_size() -> None:
    """A node passes on 64 MiB, and 64 appends of 1 MiB each were refused with 413, and repeated for ever."""
    sizes = list[int]()

    class Relay:
        async def run(self, name: str, args: Args) -> Values:
            sizes.append(sum(len(each) for each in args if isinstance(each, bytes)))
            return (b"1",) * (len(args) // 5)

    store = RedisJournals("redis://127.0.0.1:1/0", "test", share=2**30)
    store.fall_back_on(Relay())
    entries = [b"x" * 2**20] * (APPENDS_PER_CALL - 1) + [b"y" * (MOST_BYTES + 1), b"z"]
    outcomes = await store.append("r1", [Append("ann", "a", number, each, 9) for number, each in enumerate(entries)])
    assert outcomes == [AppendOutcome.STORED] * len(entries)
    assert sum(sizes) == sum(map(len, entries))
    assert all(size <= MOST_BYTES for size in sizes if size != MOST_BYTES + 1)
    await store.close()
