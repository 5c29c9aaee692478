"""A node relays what it reads of the registry, in few reads, and its own lease whatever befalls the registry."""

from __future__ import annotations

import asyncio

from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.relayed_leases import RelayedLeases
from kvferry.protocol.wire import unpack
from kvferry.worker.lease_relay import FRESH_S, READ_S, LeaseRelay
from tests.crowded import in_time

OWN, OTHER = b"own", b"other"


class Records:
    """Of a registry that has these; `hangs`: no answer comes."""

    def __init__(self, *records: bytes) -> None:
        self.announced, self.found, self.reads = OWN, list(records), 0
        self.available, self.hangs = True, False

    async def fetch(self) -> list[bytes]:
        self.reads += 1
        await asyncio.sleep(60 if self.hangs else 0.01)
        if not self.available:
            raise RegistryUnavailable("away")
        return self.found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def told(relay: LeaseRelay) -> tuple[bytes, ...]:
    message = unpack((await relay.get_leases()).body)
    assert isinstance(message, RelayedLeases)
    return message.records


async def test_its_own_lease_is_told_once_and_always() -> None:
    registry, clock = Records(OTHER, OWN), Clock()
    relay = LeaseRelay(registry, clock)
    assert await told(relay) == (OTHER, OWN)
    registry.found, clock.now = [OTHER], 1.0
    assert await told(relay) == (OTHER, OWN), "the registry lost it"
    registry.available, clock.now = False, 2.0
    assert await told(relay) == (OWN,)
    registry.announced, clock.now = b"", 3.0
    assert await told(relay) == (), "it has left"


async def test_a_registry_that_hangs_delays_no_router_for_long() -> None:
    registry = Records(OTHER)
    registry.hangs = True
    began = asyncio.get_running_loop().time()
    assert await told(LeaseRelay(registry)) == (OWN,)
    assert in_time(asyncio.get_running_loop().time() - began, READ_S + 0.3)


async def test_many_routers_cost_one_read() -> None:
    registry, clock = Records(OTHER), Clock()
    relay = LeaseRelay(registry, clock)
    assert set(await asyncio.gather(*(told(relay) for _ in range(50)))) == {(OTHER, OWN)}
    clock.now += FRESH_S / 2
    await told(relay)
    assert registry.reads == 1
    clock.now += FRESH_S
    await told(relay)
    assert registry.reads == 2


async def test_a_router_that_leaves_takes_no_answer_from_others() -> None:
    relay = LeaseRelay(Records(OTHER))
    leaves, stays = (asyncio.create_task(told(relay)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == (OTHER, OWN)
