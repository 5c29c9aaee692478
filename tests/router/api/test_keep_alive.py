"""Comments in quiet streams that clients can take up again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from starlette.types import Message

from kvferry.protocol.errors import NoNodes
from kvferry.router.api import keep_alive
from kvferry.router.api.keep_alive import CHECK_S, KEEP_ALIVE_S, KeepAlive
from kvferry.router.api.responder import Responder
from kvferry.router.api.sse import COMMENT, DONE
from tests.api_parts import FakeCluster, says
from tests.router_pair import CHAT, Exchange, Router, Shared, text_of, values
from tests.waiting import until

BODY = {"messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 3}
EVENTS = {"accept": "text/event-stream"}


def shared(gap_s: float) -> Shared:
    return Shared(FakeCluster(says("One two three."), gap_s=gap_s))


async def commented(exchange: Exchange) -> None:
    """Wait for a comment, which must come before any event."""
    sent = time.monotonic()
    await until(lambda: exchange.comments)
    assert exchange.comments[0] - sent < KEEP_ALIVE_S + 4 * CHECK_S
    assert exchange.status == 200
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert not exchange.events


@pytest.mark.parametrize("headers", [EVENTS, {"idempotency-key": "one"}])
async def test_a_quiet_stream_begins_and_goes_on_with_comments(headers: dict[str, str]) -> None:
    async with Router(shared(0.8)) as router:
        exchange = router.post(CHAT, BODY, **headers)
        await commented(exchange)
        await exchange.until(1)
        before = len(exchange.comments)
        await exchange.whole()
        assert len(exchange.comments) >= before + 2, "between the tokens as well"
        assert exchange.events[-1].endswith("data: [DONE]")
    async with Router(shared(0.0)) as undisturbed:
        assert text_of(exchange.events) == text_of((await undisturbed.post(CHAT, BODY, **headers).whole()).events)


async def test_a_resumed_stream_is_kept_alive_too() -> None:
    together = shared(0.8)
    async with Router(together) as router:
        exchange = await router.post(CHAT, BODY, **EVENTS).until(3)
        await exchange.leave()
        name = exchange.last_id.partition(":")[0]
        rest = router.get(f"{CHAT}/{name}", last_event_id=exchange.last_id, **EVENTS)
        await commented(rest)
        assert (await rest.whole()).events[-1].endswith("data: [DONE]")


@pytest.mark.parametrize("more", [{}, {"stream": False}])
async def test_nobody_else_gets_a_comment(more: dict[str, Any]) -> None:
    async with Router(shared(0.6)) as router:
        headers = {"idempotency-key": "one"} if more else {}
        exchange = router.post(CHAT, {**BODY, **more}, **headers)
        await asyncio.sleep(0.55)
        assert exchange.status == 0, "not before the first token"
        assert (await exchange.whole()).status == 200
        assert not exchange.comments


def test_openai_s_client_reads_no_event_from_a_comment() -> None:
    """It took the empty line behind one for an event without data, which is no JSON, once an event had an id."""
    first, last = b'id: a:1\ndata: {"n": 1}\n\n', b'id: a:2\ndata: {"n": 2}\n\n'
    parts = [COMMENT, first, COMMENT, COMMENT, last, COMMENT, DONE]
    assert [each.data for each in SSEDecoder().iter_bytes(iter(parts))] == ['{"n": 1}', '{"n": 2}', "[DONE]"]


async def test_a_busy_stream_gets_no_comment() -> None:
    async with Router(shared(0.02)) as router:
        exchange = await router.post(CHAT, {**BODY, "max_tokens": 60}, **EVENTS).until(1)
        before = len(exchange.comments)
        await exchange.whole()
        assert len(exchange.comments) == before


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "no_nodes"), ("/v1/messages", "overloaded_error")])
async def test_an_error_after_a_comment_is_the_last_event(path: str, kind: str) -> None:
    together = Shared(FakeCluster(lambda spec: [NoNodes("no node is left")], gap_s=0.7))
    async with Router(together) as router:
        exchange = await router.post(path, BODY, **EVENTS).whole()
        assert exchange.status == 200
        assert exchange.comments
        error = values(exchange.events)[0]["error"]
        assert kind in (error.get("code"), error["type"])
        assert error["message"] == "no node is left"
        assert exchange.events[0].startswith("event: error\n") is (path != CHAT)


class Wire:
    """A connection that takes nothing while `is_full`."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_full, self.has_room = False, asyncio.Event()

    async def send(self, message: Message) -> None:
        if self.is_full:
            await self.has_room.wait()
        self.sent.append(message)


async def test_a_client_that_does_not_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(keep_alive, "CHECK_S", 0.01)
    wire, alive = Wire(), KeepAlive()
    responder = Responder(wire.send, "/")
    with alive.kept(responder):
        wire.is_full = True
        await asyncio.sleep(0.1)
        assert not wire.sent
        writing = asyncio.ensure_future(responder.begin_stream({}, lambda error: b""))
        await asyncio.sleep(0.1)
        wire.is_full = False
        wire.has_room.set()
        await writing
        assert [message["type"] for message in wire.sent] == ["http.response.start"]
        await asyncio.sleep(0.1)
        assert len(wire.sent) > 2, "the client reads again"
    told = len(wire.sent)
    await asyncio.sleep(0.1)
    assert len(wire.sent) == told
    assert responder.send == wire.send


async def test_one_timer_serves_all_streams_and_ends_with_them() -> None:
    alive, wires = KeepAlive(), [Wire() for _ in range(3)]
    loop = asyncio.get_running_loop()
    before = len([each for each in loop._scheduled if not each.cancelled()])  # type: ignore[attr-defined]
    first, second, third = (alive.kept(Responder(wire.send, "/")) for wire in wires)
    with first, second, third:
        assert len([each for each in loop._scheduled if not each.cancelled()]) == before + 1  # type: ignore[attr-defined]
        await asyncio.sleep(KEEP_ALIVE_S + 2 * CHECK_S)
        assert all(len(wire.sent) == 2 for wire in wires), "a head and a comment each"
    await asyncio.sleep(2 * CHECK_S)
    assert len([each for each in loop._scheduled if not each.cancelled()]) == before  # type: ignore[attr-defined]
