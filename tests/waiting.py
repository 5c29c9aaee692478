"""Waiting for what cannot be awaited: any state that a test can see. A wait that lasts longer than its limit fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx


async def until(condition: Callable[[], object], limit_s: float = 15.0) -> float:
    """Seconds until the condition held; the event loop runs meanwhile."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def until_told(client: httpx.AsyncClient, line: str, limit_s: float = 15.0) -> str:
    """The metrics of a process once they contain the line: what is counted there ends a moment after its answer."""
    began = time.monotonic()
    while line not in (text := (await client.get("/metrics")).text):
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s: {line}"
        await asyncio.sleep(0.02)
    return text


def wait_for(condition: Callable[[], object], limit_s: float = 10.0, say: Callable[[], object] = lambda: "") -> float:
    """The same without an event loop, or while it is to stand still. `say` tells how far it came. Long waits
    look less often, for what they look at may cost other processes time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s: {say()}"
        time.sleep(limit_s / 1000)
    return time.monotonic() - began
