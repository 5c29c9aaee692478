"""Waiting for a client to go away."""

from __future__ import annotations

from typing import Any

from process.disconnect import disconnected


async def test_only_a_disconnect_ends_the_wait() -> None:
    told: list[Any] = [{"type": "http.request", "more_body": False}, {"type": "http.disconnect"}, {"type": "never"}]

    async def receive() -> Any:
        return told.pop(0)

    await disconnected(receive)
    assert told == [{"type": "never"}]
