"""Long bodies take a small part of the event loop's time together, and no one waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.protocol.errors import Overloaded
from kvferry.router.api.bodies.parse_pacing import CREDIT_S, LONG_S, PATIENCE_S, SHARE, ParsePacing, measured_s


async def test_what_a_body_costs() -> None:
    assert await measured_s(b"a" * 2**16) < LONG_S, "a prompt of some ten thousand words is not long"
    assert await measured_s(b"1," * 2**15) < LONG_S, "nor is one of as many token ids"
    assert await measured_s(b"{},[" * 10**5) > LONG_S
    assert await measured_s(b"a" * 2**24) > LONG_S


async def test_short_ones_never_wait_and_long_ones_share() -> None:
    pace, began = ParsePacing(), time.monotonic()
    await pace.turn(CREDIT_S)
    await pace.turn(CREDIT_S / 20)
    assert time.monotonic() - began < 1
    began = time.monotonic()
    await asyncio.gather(*(pace.turn(LONG_S) for _ in range(4)), *(pace.turn(LONG_S / 2) for _ in range(999)))
    assert time.monotonic() - began > 3 * LONG_S / SHARE


async def test_what_would_wait_too_long_is_told_to_come_back() -> None:
    pace = ParsePacing()
    await pace.turn(CREDIT_S + (PATIENCE_S + 1) * SHARE)
    began = time.monotonic()
    with pytest.raises(Overloaded) as caught:
        await pace.turn(LONG_S)
    assert time.monotonic() - began < 1
    assert caught.value.retry_after
    await pace.turn(LONG_S / 2)
