"""A process that renders templates does not outlive the task that started it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading

import pytest

from kvferry.router.text import async_render_child
from kvferry.router.text.async_render_child import AsyncRenderChild

Started = tuple[subprocess.Popen[bytes], socket.socket]


async def has_ended(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while process.returncode is None:  # noqa: ASYNC110 - reading it reaps no process
                await asyncio.sleep(0.01)
    return process.returncode is not None


async def test_a_start_that_is_cancelled_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread went on, and nobody knew its process: it ran until the router ended."""
    may_start, begun, started = threading.Event(), threading.Event(), list[Started]()
    start = async_render_child._start

    def slow() -> Started:
        begun.set()
        may_start.wait(10)
        started.append(start())
        return started[-1]

    monkeypatch.setattr(async_render_child, "_start", slow)
    starting = asyncio.create_task(AsyncRenderChild.started())
    await asyncio.to_thread(begun.wait, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_start.set()
    async with asyncio.timeout(10):
        while not started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ((process, ours),) = started
    try:
        assert await has_ended(process)
        assert ours.fileno() == -1
    finally:
        process.kill()


async def test_a_connection_that_fails_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[Started](), async_render_child._start

    def watched() -> Started:
        started.append(start())
        return started[-1]

    async def fails(**_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(async_render_child, "_start", watched)
    monkeypatch.setattr(asyncio, "open_unix_connection", fails)
    with pytest.raises(asyncio.CancelledError):
        await AsyncRenderChild.started()
    ((process, _),) = started
    try:
        assert await has_ended(process)
    finally:
        process.kill()
