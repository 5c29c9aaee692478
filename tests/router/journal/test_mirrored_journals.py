"""Requests with a key that begin while the store is away: they are recorded there as soon as it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.protocol.errors import RegistryUnavailable
from tests.api_parts import FakeCluster, says
from tests.router_pair import CHAT, LEASE_S, Router, Shared, text_of

TEXT = "One two three four five six seven eight nine ten. " * 3
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 200}
STREAM = {**BODY, "stream": True}
EVENTS = {"accept": "text/event-stream"}


def away(together: Shared, *, is_away: bool) -> None:
    together.journals.available = together.leases.available = not is_away


async def test_a_stream_that_began_while_the_store_was_away_survives_its_router() -> None:
    together = Shared(FakeCluster(says(TEXT), gap_s=0.02))
    async with Router(together) as first, Router(together) as second:
        whole = text_of((await second.post(CHAT, STREAM, **EVENTS).whole()).events)
        away(together, is_away=True)
        exchange = await first.post(CHAT, STREAM, idempotency_key="k", **EVENTS).until(5)
        assert first.count("kvferry_journal_failures_total", reason="store") >= 1
        away(together, is_away=False)
        await exchange.until(len(exchange.events) + 30)
        first.kill()
        await asyncio.sleep(LEASE_S + 0.1)
        rest = await second.post(CHAT, STREAM, last_event_id=exchange.last_id).whole()
        assert rest.status == 200
        assert text_of([*exchange.events, *rest.events]) == whole
        again = await second.post(CHAT, STREAM, idempotency_key="k", **EVENTS).whole()
        assert text_of(again.events) == whole
        assert len(together.cluster.dispatches) == 3


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_answer_that_ends_or_breaks_is_found_at_another_router(leaves: bool) -> None:
    together = Shared(FakeCluster(says(TEXT), gap_s=0.01))
    async with Router(together) as first, Router(together) as second:
        away(together, is_away=True)
        exchange = await first.post(CHAT, STREAM, idempotency_key="k", **EVENTS).until(5)
        await (exchange.leave() if leaves else exchange.whole())
        away(together, is_away=False)
        await asyncio.sleep(1.0)
        record = await together.journals.read("", next(iter(together.journals._records[""])))
        assert record is not None
        assert record.owner == ("" if leaves else first.journals._owner)
        again = await second.post(CHAT, STREAM, idempotency_key="k", **EVENTS).whole()
        assert text_of(again.events)[0] == TEXT
        assert len(together.cluster.dispatches) == 1 + leaves


async def test_another_router_that_began_the_same_request_keeps_it() -> None:
    """Both compute it then, and each client gets one answer."""
    together = Shared(FakeCluster(says(TEXT), gap_s=0.02))
    async with Router(together) as first, Router(together) as second:
        away(together, is_away=True)
        one = first.post(CHAT, BODY, idempotency_key="k")
        await asyncio.sleep(0.2)
        away(together, is_away=False)
        other = second.post(CHAT, BODY, idempotency_key="k")
        answers = [await each.whole() for each in (one, other)]
        assert [each.status for each in answers] == [200, 200]
        texts = {each.json()["choices"][0]["message"]["content"] for each in answers}
        assert len(texts) == 1


async def test_a_call_that_opened_the_journal_without_an_answer_does_not_keep_it_from_the_store() -> None:
    """The store answers again at once: neither a released nor a deleted journal may be left of the first call."""
    together = Shared(FakeCluster(says(TEXT), gap_s=0.02))
    async with Router(together) as first, Router(together) as second:
        opens = together.journals.open

        async def unanswered(*args: Any, **fields: Any) -> str:
            await opens(*args, **fields)
            together.journals.open = opens  # type: ignore[method-assign]
            raise RegistryUnavailable("no answer in time")

        together.journals.open = unanswered  # type: ignore[method-assign]
        exchange = await first.post(CHAT, STREAM, idempotency_key="k", **EVENTS).until(30)
        first.kill()
        await asyncio.sleep(LEASE_S + 0.1)
        rest = await second.post(CHAT, STREAM, last_event_id=exchange.last_id).whole()
        assert text_of([*exchange.events, *rest.events])[0] == TEXT
