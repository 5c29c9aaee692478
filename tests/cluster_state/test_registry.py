"""Registry and LeaseKeeper, on Valkey and in memory."""

import asyncio
from dataclasses import replace

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.cluster_state.registry import Announced, LeaseKeeper
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.lease import Load, NodeLease
from tests.waiting import until

LEASE = NodeLease(
    node_id="decode-a:1",
    role="decode",
    epoch=1_790_000_000_000_001,
    state="ready",
    http_url="http://10.0.0.1:80",
    link_address="10.0.0.1:81",
    fingerprint="f" * 32,
    model="tiny",
    max_model_len=8192,
    block_size=16,
    block_bytes=368_640,
    load=Load(free_blocks=7, total_blocks=7),
)
LIFE_S = 0.5
"""Of leases that a keeper of these tests renews."""
NEWER = replace(LEASE, epoch=LEASE.epoch + 1)


async def test_a_lease_comes_back_whole(store):
    assert await store.nodes() == []
    other = replace(LEASE, node_id="prefill-ü", role="prefill")
    assert await store.announce(LEASE) is Announced.CREATED
    assert await store.announce(other) is Announced.CREATED
    busier = replace(LEASE, load=Load(active_blocks=7, total_blocks=7))
    assert await store.announce(busier) is Announced.RENEWED
    assert sorted(await store.nodes(), key=lambda lease: lease.node_id) == [busier, other]


async def test_a_lease_expires_unless_renewed(store):
    await store.announce(LEASE)
    await store.announce(replace(LEASE, node_id="b"))
    for _ in range(4):
        await asyncio.sleep(0.3)
        assert await store.announce(LEASE) is Announced.RENEWED
    assert await store.nodes() == [LEASE]
    await asyncio.sleep(1.0)
    assert await store.nodes() == []
    assert await store.announce(LEASE) is Announced.CREATED


async def test_the_newer_epoch_wins(store):
    await store.announce(LEASE)
    assert await store.announce(NEWER) is Announced.CREATED
    assert await store.announce(LEASE) is Announced.FENCED
    assert await store.nodes() == [NEWER]
    await store.withdraw(LEASE.node_id, LEASE.epoch)
    assert await store.nodes() == [NEWER]
    await store.withdraw(NEWER.node_id, NEWER.epoch)
    assert await store.nodes() == []
    await store.withdraw(NEWER.node_id, NEWER.epoch)


async def test_an_expired_newer_epoch_no_longer_fences(store):
    await store.announce(NEWER)
    await asyncio.sleep(1.0)
    assert await store.announce(LEASE) is Announced.CREATED
    assert await store.nodes() == [LEASE]


async def test_epochs_rise_though_the_clock_is_set_back(store):
    first = await store.next_epoch("a", 1_790_000_000_000_001)
    assert first == 1_790_000_000_000_001
    assert await store.next_epoch("a", first - 10_000_000) == first + 1
    assert await store.next_epoch("a", first + 10_000_000) == first + 10_000_000
    assert await store.next_epoch("b", 5) == 5
    await store.announce(LEASE)
    assert await store.next_epoch(LEASE.node_id, 7) == LEASE.epoch + 1


class _Keeping:
    """A LeaseKeeper on a memory store, renewing every 20 ms, with its callbacks recorded."""

    def __init__(self, lease: NodeLease = LEASE) -> None:
        self.store = MemoryStore(lease_s=LIFE_S)
        self.lease, self.made, self.restored = lease, 0, 0
        self.outcomes: list[str] = []
        self.keeper = LeaseKeeper(
            self.store,
            self._make,
            on_restored=self._restored,
            on_outcome=self.outcomes.append,
            period_s=0.02,
            lease_s=LIFE_S,
        )

    def _make(self) -> NodeLease:
        self.made += 1
        return self.lease

    def _restored(self) -> None:
        self.restored += 1

    async def __aenter__(self) -> "_Keeping":
        self.keeper.start()
        await self.keeper.first_held()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.keeper.stop()


async def test_keeper_renews_and_withdraws():
    async with _Keeping() as k:
        assert await k.store.nodes() == [LEASE]
        k.lease = replace(LEASE, state="draining")
        assert await k.keeper.announce_now()
        assert await k.store.nodes() == [k.lease]
        await until(lambda: k.outcomes.count("renewed") >= 5)
        assert await k.store.nodes() == [k.lease]
    assert await k.store.nodes() == []
    made = k.made
    await asyncio.sleep(0.06)
    assert k.made == made
    assert k.restored == 0
    assert (k.outcomes[0], set(k.outcomes[1:])) == ("created", {"renewed"})


async def test_keeper_survives_an_outage_and_tells_its_end():
    async with _Keeping() as k:
        k.store.available = False
        assert not await k.keeper.announce_now()
        await until(lambda: k.outcomes.count("failed") >= 4)
        assert k.restored == 0
        k.store.available = True
        await until(lambda: k.restored == 1)
        assert await k.store.nodes() == [LEASE]
        await until(lambda: k.outcomes[-1] == "renewed")
        assert k.restored == 1


async def test_keeper_notices_that_the_registry_lost_its_data():
    async with _Keeping() as k:
        k.store.flush()
        await until(lambda: k.restored == 1)
        assert k.outcomes.count("failed") == 0


async def test_keeper_starts_without_a_registry_and_stops_without_one():
    k = _Keeping()
    k.store.available = False
    k.keeper.start()
    await until(lambda: k.outcomes)
    assert k.outcomes[0] == "failed"
    assert not k.keeper.held
    k.store.available = True
    await until(lambda: k.restored == 1)
    k.store.available = False
    await k.keeper.stop()
    with pytest.raises(RegistryUnavailable):
        await k.store.nodes()


async def test_a_lease_is_held_for_its_life_after_the_last_answer(caplog):
    async with _Keeping() as k:
        assert k.keeper.held
        k.store.available = False
        await until(lambda: k.outcomes[-1] == "failed")
        assert k.keeper.held
        await until(lambda: not k.keeper.held)
        await until(lambda: any("lapsed" in record.message for record in caplog.records))
        failures = k.outcomes.count("failed")
        await until(lambda: k.outcomes.count("failed") >= failures + 3)
        k.store.available = True
        await until(lambda: k.keeper.held)
    assert not k.keeper.held
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split()[1] for message in told] == ["not", "lease"], told


async def test_keeper_of_an_older_process_leaves_the_newer_alone():
    async with _Keeping() as k:
        await k.store.announce(NEWER)
        await until(lambda: k.outcomes.count("fenced") >= 2)
        assert not await k.keeper.announce_now()
        assert not k.keeper.held
        assert await k.store.nodes() == [NEWER]
    assert await k.store.nodes() == [NEWER]


async def test_keeper_outlives_a_broken_lease_factory():
    async with _Keeping() as k:
        good, k.lease = k.lease, None  # type: ignore[assignment]
        await until(lambda: k.outcomes.count("failed") >= 2)
        k.lease = good
        await until(lambda: k.restored == 1)


class _Forgetful(MemoryStore):
    """Takes leases and shows none: not the registry that routers read. `keeps`: whether it has them at the renewal."""

    shows, keeps = False, True

    async def nodes(self) -> list[NodeLease]:
        return await super().nodes() if self.shows else []

    async def announce(self, lease: NodeLease) -> Announced:
        if not self.keeps:
            self.flush()
        return await super().announce(lease)


async def test_a_lease_stands_once_it_was_read_back_and_renewed(caplog):
    k = _Keeping()
    store = k.keeper._registry = _Forgetful(lease_s=LIFE_S)
    k.keeper.start()
    await until(lambda: len(k.outcomes) >= 5)
    assert not k.keeper.held
    assert [record.message for record in caplog.records] == [
        f"the registry accepted the lease of {(LEASE.node_id, LEASE.epoch)} and then lost it"
    ]
    store.shows, store.keeps = True, False
    tried = len(k.outcomes)
    await until(lambda: len(k.outcomes) >= tried + 4)
    assert not k.keeper.held, "it is written each time anew"
    store.keeps = True
    await asyncio.wait_for(k.keeper.first_held(), 5)
    assert k.keeper.held
    await k.keeper.stop()


async def test_a_lease_that_lapsed_must_be_read_back_again():
    async with _Keeping() as k:
        k.store.available = False
        await until(lambda: not k.keeper.held)
        k.store.nodes = _Forgetful().nodes  # type: ignore[method-assign]
        k.store.available = True
        tried = len(k.outcomes)
        await until(lambda: k.outcomes[tried:].count("renewed") >= 3)
        assert not k.keeper.held
        del k.store.nodes
        await until(lambda: k.keeper.held)
