"""Tokens pass by a dispatch's mail where its reader waits for just them; everything else goes through it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.events import NodeDrains
from kvferry.router.dispatch.hedged_attempts import HedgedAttempts
from kvferry.router.dispatch.timers import EventQueue
from kvferry.router.dispatch.token_order import OrderedTokens
from kvferry.router.dispatch.token_sink import TokenSink

FIRST, NEXT = TokenDelta("r", 0, 0, (7,)), TokenDelta("r", 0, 1, (8, 9))


class Heard:
    """A dispatch's ears, once its first token is out, and what came to whom."""

    def __init__(self) -> None:
        self.queue, self.hedged, self.sequence = EventQueue[Any](), HedgedAttempts(), OrderedTokens()
        self.hedged.enter(SimpleNamespace(job=SimpleNamespace(attempt=0)))  # type: ignore[arg-type]
        list(self.sequence.push(FIRST))
        self.listening = TokenSink(self.queue, self.sequence, self.hedged, jobs.output)
        self.outputs: list[tuple[int, ...]] = []
        self.listening.listen(lambda output: self.outputs.append(output.token_ids))

    async def posted(self, event: Any) -> bool:
        """Whether an event that is heard while the reader waits wakes it."""
        reader = asyncio.create_task(self.queue.next())
        await asyncio.sleep(0)
        self.listening.receive(event)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        return reader.done()


@pytest.fixture
async def heard() -> Heard:
    return Heard()


async def test_the_next_tokens_are_told_and_wake_nobody(heard: Heard) -> None:
    assert not await heard.posted(NEXT)
    assert not await heard.posted(replace(NEXT, index=3, token_ids=(10,)))
    assert heard.outputs == [(8, 9), (10,)]
    assert heard.sequence.tokens == [7, 8, 9, 10]


@pytest.mark.parametrize(
    "event",
    [
        replace(NEXT, finish_reason="length"),
        replace(NEXT, index=2),
        replace(NEXT, index=0),
        replace(NEXT, attempt=1),
        replace(NEXT, reuse=Reuse(1, computed=1)),
        NodeDrains(0),
    ],
)
async def test_all_else_goes_by_the_mail(heard: Heard, event: Any) -> None:
    assert await heard.posted(event)
    assert heard.outputs == []
    assert heard.sequence.tokens == [7]


async def test_what_comes_while_nobody_waits_keeps_its_order(heard: Heard) -> None:
    heard.listening.receive(NEXT)
    heard.listening.receive(replace(NEXT, index=3))
    assert heard.outputs == []
    assert [(await heard.queue.next()).index for _ in range(2)] == [1, 3]


async def test_what_came_early_goes_first(heard: Heard) -> None:
    list(heard.sequence.push(replace(NEXT, index=3)))
    assert await heard.posted(NEXT)
    assert heard.outputs == []


async def test_of_two_attempts_neither_passes_before_one_has_won(heard: Heard) -> None:
    heard.hedged.enter(SimpleNamespace(job=SimpleNamespace(attempt=1)))  # type: ignore[arg-type]
    assert await heard.posted(NEXT)
    assert heard.outputs == []


async def test_the_first_token_is_for_the_reader() -> None:
    heard = Heard()
    heard.sequence.tokens.clear()
    assert await heard.posted(FIRST)
    assert heard.outputs == []


async def test_what_the_listener_raises_is_told_to_the_reader(heard: Heard) -> None:
    def broken(output: Any) -> None:
        raise ValueError("no text for that")

    heard.listening.listen(broken)
    assert await heard.posted(NEXT)
