"""Threads beside the event loop: the smallest goes first, too much is refused, and nobody who left is worked for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.router.text.tokenizer_threads import MAX_WAITING_CHARS, SHORT_CHARS, TokenizerThreads


@pytest.fixture
async def gate() -> threading.Event:
    return threading.Event()


async def test_the_smallest_goes_first_and_short_ones_pass_the_long(gate: threading.Event) -> None:
    lanes, done = TokenizerThreads(), list[str]()
    held = [asyncio.create_task(lanes.run(gate.wait, 20, size=SHORT_CHARS + 1)) for _ in range(8)]
    await asyncio.sleep(0)
    waiting = [
        asyncio.create_task(lanes.run(done.append, name, size=size))
        for name, size in (("long", 9 * SHORT_CHARS), ("longer", 10 * SHORT_CHARS), ("less long", 8 * SHORT_CHARS))
    ]
    await asyncio.sleep(0)
    await asyncio.wait_for(lanes.run(done.append, "short", size=10), 5)
    assert done == ["short"]
    gate.set()
    await asyncio.gather(*held, *waiting)
    assert done[1:] == ["less long", "long", "longer"]


async def test_too_much_that_waits_is_refused_and_who_leaves_is_not_worked_for(gate: threading.Event) -> None:
    lanes, done = TokenizerThreads(), list[str]()
    held = [asyncio.create_task(lanes.run(gate.wait, 20, size=SHORT_CHARS + 1)) for _ in range(8)]
    await asyncio.sleep(0)
    leaver = asyncio.create_task(lanes.run(done.append, "gone", size=MAX_WAITING_CHARS // 2))
    stays = asyncio.create_task(lanes.run(done.append, "stays", size=MAX_WAITING_CHARS // 4))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await lanes.run(done.append, "too much", size=MAX_WAITING_CHARS // 2)
    leaver.cancel()
    await asyncio.sleep(0.01)
    more = asyncio.create_task(lanes.run(done.append, "now it may", size=MAX_WAITING_CHARS // 2))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*held, stays, more)
    assert done == ["stays", "now it may"]
