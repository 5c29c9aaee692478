"""Token streams: opened, dealt out, broken, opened again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from kvferry.protocol.errors import Fenced, KvferryError, NodeLost, StreamLost
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import AttemptFailed, Deviation, StepFrame, TokenDelta
from kvferry.protocol.process_names import NodeName
from kvferry.router.nodes import token_streams
from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_entry import NodeEntry
from kvferry.router.nodes.token_streams import TokenStreams
from kvferry.runtime.suspend_aware_clock import LoopClock
from tests.fake_workers import Bench, decode, lease_of, prefill
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("twin")

D1 = lease_of("d1", "decode")
KEY = ("d1", 1)


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def delta(self, delta: TokenDelta) -> None:
        self.heard.append(delta)

    def failed(self, failure: AttemptFailed) -> None:
        self.heard.append(failure)

    def lost(self, error: KvferryError) -> None:
        self.heard.append(error)

    def drains(self) -> None:
        self.heard.append("drains")


class Body:
    """Frames put in one at a time; None ends the stream, an exception breaks it."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[StepFrame | Exception | None] = asyncio.Queue()


class Node:
    """A client for which every stream is the next of `bodies`, or is refused when there is none."""

    def __init__(self, *bodies: Body) -> None:
        self.bodies, self.asked = list(bodies), 0
        self.after: list[int | None] = []
        self.keeps = False
        self.gone: KvferryError = StreamLost("nothing is kept")

    silence_s = 0.2
    clock = staticmethod(time.monotonic)

    async def stream(
        self, node: NodeLease, after: int | None, opened: Callable[[], None], deliver: Callable[[StepFrame], None]
    ) -> None:
        self.asked += 1
        self.after.append(after)
        if after is not None and not self.keeps:
            raise self.gone
        if not self.bodies:
            raise NodeLost("refused")
        body = self.bodies.pop(0)
        opened()
        while (part := await body.parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            deliver(part)
        raise NodeLost(f"{node.node_id} closed the token stream")


def streams_to(node: Node) -> tuple[TokenStreams, NodeEntry]:
    streams = TokenStreams(cast(NodeClient, node), first_backoff_s=0.01, last_backoff_s=0.02)
    return streams, NodeEntry(D1, CapacitySummary("m"))


def delta(request_id: str, index: int = 0) -> TokenDelta:
    return TokenDelta(request_id, 0, index, (5,))


async def test_frames_are_dealt_out_by_request() -> None:
    body = Body()
    streams, d1 = streams_to(Node(body))
    streams.keep([d1])
    await until(lambda: d1.open)
    one, two = Listener(), Listener()
    d1.listeners["r1"] = one
    d1.listeners["r2"] = two
    failure = AttemptFailed("r2", 0, "server_error", "x")
    body.parts.put_nowait(StepFrame((delta("r1"), delta("r3"), delta("r2")), (failure,)))
    await until(lambda: len(two.heard) == 2)
    assert one.heard == [delta("r1")]
    assert two.heard == [delta("r2"), failure]
    del d1.listeners["r1"]
    body.parts.put_nowait(StepFrame((delta("r1", 1), delta("r2", 1))))
    await until(lambda: len(two.heard) == 3)
    assert len(one.heard) == 1
    await streams.close()
    assert isinstance(two.heard[-1], NodeLost)


async def test_a_process_that_another_one_replaced_is_lost_at_once() -> None:
    """It answers at the same address: waiting for silence would be in vain, and what it had cached is gone."""
    body, listener = Body(), Listener()
    node = Node(body)
    node.gone = Fenced("another epoch")
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: d1.open)
    d1.listeners["r1"] = listener
    body.parts.put_nowait(None)
    await until(lambda: listener.heard)
    assert isinstance(listener.heard[-1], Fenced)
    await streams.close()


@pytest.mark.parametrize("end", [None, NodeLost("reset"), ValueError("unreadable")])
async def test_a_broken_stream_fails_its_listeners_and_is_opened_again(end: Any) -> None:
    first, second = Body(), Body()
    streams, d1 = streams_to(Node(first, second))
    streams.keep([d1])
    await until(lambda: d1.open)
    listener, late = Listener(), Listener()
    d1.listeners["r1"] = listener
    first.parts.put_nowait(end)
    await until(lambda: len(listener.heard) == 1)
    assert isinstance(listener.heard[0], KvferryError)
    await until(lambda: d1.open)
    d1.listeners["r2"] = late
    second.parts.put_nowait(StepFrame((delta("r1"), delta("r2"))))
    await until(lambda: len(late.heard) == 1)
    assert len(listener.heard) == 1
    await streams.close()


async def test_only_a_stream_that_requests_need_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.router.nodes.token_streams")
    first, second = Body(), Body()
    streams, d1 = streams_to(Node(first, second))
    streams.keep([d1])
    await until(lambda: d1.open)
    first.parts.put_nowait(None)
    await until(lambda: bool(caplog.records) and d1.open)
    d1.listeners["r1"] = Listener()
    second.parts.put_nowait(None)
    await until(lambda: len(caplog.records) == 2)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "1 requests on it: nothing is kept" in caplog.messages[1]
    await streams.close()


async def test_a_node_that_refuses_is_asked_again_until_it_left() -> None:
    node = Node()
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: node.asked > 3)
    assert not d1.open
    streams.keep([])
    asked = node.asked
    await asyncio.sleep(0.05)
    assert node.asked <= asked + 1
    await streams.close()


async def test_a_node_that_left_fails_its_listeners() -> None:
    streams, d1 = streams_to(Node(Body()))
    streams.keep([d1])
    await until(lambda: d1.open)
    listener = Listener()
    d1.listeners["r1"] = listener
    streams.keep([])
    assert isinstance(listener.heard[0], NodeLost)
    assert not d1.open
    await streams.close()


async def test_a_stream_that_breaks_goes_on_and_nobody_notices() -> None:
    first, second = Body(), Body()
    node = Node(first, second)
    node.keeps = True
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: d1.open)
    listener = Listener()
    d1.listeners["r1"] = listener
    first.parts.put_nowait(replace(StepFrame((delta("r1"),)), number=1))
    await until(lambda: len(listener.heard) == 1)
    first.parts.put_nowait(NodeLost("reset"))
    await until(lambda: node.asked == 2)
    assert node.after == [None, 1]
    for number in (1, 2):
        second.parts.put_nowait(replace(StepFrame((delta("r1", number - 1),)), number=number))
    await until(lambda: len(listener.heard) == 2)
    assert listener.heard == [delta("r1", 0), delta("r1", 1)]
    assert d1.open
    await streams.close()


async def test_a_frame_of_deviations_alone_has_a_number_too_and_counts_once() -> None:
    first, second = Body(), Body()
    node = Node(first, second)
    node.keeps = True
    streams, d1 = streams_to(node)
    told: list[NodeName] = []
    d1._corrupt = lambda sender, here: told.append(sender)
    streams.keep([d1])
    await until(lambda: d1.open)
    frame = StepFrame(number=1, deviations=(Deviation("r1", ("p1", 1)),))
    first.parts.put_nowait(frame)
    await until(lambda: told)
    first.parts.put_nowait(NodeLost("reset"))
    await until(lambda: node.asked == 2)
    second.parts.put_nowait(frame)
    second.parts.put_nowait(StepFrame(number=2, deviations=(Deviation("r2", ("p2", 1)),)))
    await until(lambda: len(told) > 1)
    assert told == [("p1", 1), ("p2", 1)]
    assert d1.open
    await streams.close()


async def test_a_frame_that_is_missing_is_not_passed_over() -> None:
    body = Body()
    node = Node(body)
    node.keeps = True
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: d1.open)
    listener = Listener()
    d1.listeners["r1"] = listener
    body.parts.put_nowait(replace(StepFrame((delta("r1"),)), number=2))
    await until(lambda: bool(listener.heard))
    assert isinstance(listener.heard[0], NodeLost)
    await streams.close()


async def test_a_node_that_stays_away_is_lost_after_a_while() -> None:
    body = Body()
    node = Node(body)
    node.keeps = True
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: d1.open)
    listener = Listener()
    d1.listeners["r1"] = listener
    body.parts.put_nowait(NodeLost("reset"))
    await until(lambda: not d1.open)
    assert d1.linked
    assert listener.heard == []
    assert 0.2 < await until(lambda: not d1.linked) < 2
    assert isinstance(listener.heard[0], NodeLost)
    await streams.close()


async def test_frames_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_streams, "ACKNOWLEDGE_S", 0.05)
    async with Bench([decode()]) as bench:
        await until(lambda: len(bench["d1"].seen) > 2)


async def test_a_router_that_stood_still_calls_nobody_dead() -> None:
    async with Bench([decode(), prefill()], silence_s=0.4, clock=(clock := LoopClock(0.02)).now) as bench:
        clock.start()
        listener = Listener()
        bench.nodes.entries[KEY].listeners["r1"] = listener
        for _ in range(3):
            time.sleep(1.0)  # noqa: ASYNC251 - its nodes stand still with it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert listener.heard == []
        bench.nodes.entries[KEY].listeners.clear()
        clock.stop()


async def test_silence_breaks_a_real_stream() -> None:
    async with Bench([decode()], silence_s=1.5) as bench:
        listener = Listener()
        bench.nodes.entries[KEY].listeners["r1"] = listener
        await asyncio.sleep(2.0)
        assert listener.heard == []
        bench["d1"].frozen = True
        bench["d1"]._queues["router-test"].put_nowait(StepFrame())
        await until(lambda: len(listener.heard) == 1)
        assert isinstance(listener.heard[0], NodeLost)


@pytest.mark.parametrize("gap_s", [0.05, 0.4])
async def test_a_node_whose_heartbeats_are_often_late_is_lost_later(gap_s: float) -> None:
    """On a machine that three clusters shared, a node was lost because its process got no core for 1.6 s."""
    bodies, now = [Body(), Body()], [0.0]
    node, listener = Node(*bodies), Listener()
    node.keeps, node.clock = True, lambda: now[0]  # type: ignore[method-assign]
    streams, d1 = streams_to(node)
    streams.keep([d1])
    await until(lambda: d1.open)
    d1.listeners["r1"] = listener
    now[0] += gap_s
    bodies[0].parts.put_nowait(StepFrame((delta("r1"),), number=1))
    await until(lambda: listener.heard)
    now[0] += 0.6
    silence = NodeLost("silent")
    silence.__cause__ = TimeoutError()
    bodies[0].parts.put_nowait(silence)
    await until(lambda: node.asked > 1)
    assert (len(listener.heard) > 1) == (gap_s < 0.2), "twice the limit of 0.2 s, or thrice the gap"
    await streams.close()
