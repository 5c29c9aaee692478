"""Places for renderings: short ones never wait for long ones, tenants take turns, and who waits is bounded."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.router.text import render_slots
from kvferry.router.text.render_slots import FAST_PLACES, MAX_WAITING_BYTES, SLOW_PLACES, Place, RenderSlots


async def full() -> tuple[RenderSlots, list[Place]]:
    slots = RenderSlots()
    return slots, [await slots.enter("first", 1) for _ in range(FAST_PLACES)]


async def test_tenants_take_turns() -> None:
    slots, places = await full()
    order: list[str] = []

    async def render(tenant: str) -> None:
        place = await slots.enter(tenant, 1)
        order.append(tenant)
        await asyncio.sleep(0)
        slots.leave(place)

    crowd = [asyncio.create_task(render("crowd")) for _ in range(6)]
    await asyncio.sleep(0)
    other = asyncio.create_task(render("other"))
    await asyncio.sleep(0)
    for place in places:
        slots.leave(place)
    await asyncio.gather(*crowd, other)
    assert "other" in order[:3]


async def test_a_slow_rendering_frees_its_place_for_others_and_not_for_its_own_tenant() -> None:
    slots, (place, _) = await full()
    own, other = (asyncio.create_task(slots.enter(tenant, 1)) for tenant in ("first", "other"))
    await asyncio.sleep(0)
    assert slots.move_to_slow(place)
    await asyncio.sleep(0)
    assert (own.done(), other.done()) == (False, True)
    slots.leave(await other)
    slots.leave(place)
    slots.leave(await asyncio.wait_for(own, 1))


async def test_few_renderings_are_slow_at_once() -> None:
    slots = RenderSlots()
    places = []
    for number in range(SLOW_PLACES + 1):
        places.append(await slots.enter(f"{number}", 1))
        assert slots.move_to_slow(places[-1]) is (number < SLOW_PLACES)
    for place in places:
        slots.leave(place)
    assert slots.move_to_slow(await slots.enter("again", 1))


async def test_the_bytes_that_wait_are_bounded_and_shared() -> None:
    slots, places = await full()
    waiting = [asyncio.create_task(slots.enter(name, MAX_WAITING_BYTES // 4)) for name in ("a", "a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="waiting to be rendered"):
        await slots.enter("a", MAX_WAITING_BYTES // 4)
    single = asyncio.create_task(slots.enter("c", MAX_WAITING_BYTES))
    for place in places:
        slots.leave(place)
    for task in (*waiting, single):
        slots.leave(await asyncio.wait_for(task, 1))


async def test_who_waits_too_long_is_refused_and_who_leaves_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, places = await full()
    leaver = asyncio.create_task(slots.enter("a", 1))
    await asyncio.sleep(0)
    slots.leave(places.pop())
    leaver.cancel()  # it has a place and was not told yet
    await asyncio.gather(leaver, return_exceptions=True)
    places.append(await asyncio.wait_for(slots.enter("b", 1), 1))
    monkeypatch.setattr(render_slots, "WAIT_S", 0.05)
    with pytest.raises(Overloaded, match="to be rendered"):
        await slots.enter("a", 1)
    for place in places:
        slots.leave(place)
    assert [await asyncio.wait_for(slots.enter("a", 1), 1) for _ in range(FAST_PLACES)]
