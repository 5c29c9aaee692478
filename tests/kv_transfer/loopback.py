"""In-process link for tests, with deterministic time and order.

Nothing happens until `step` runs one event. Events wait in lanes. A lane keeps its order: commands of one link, control
messages in one direction of a connection, completions of one link. Each block and each loss has a lane of its own, and
lanes may overtake each other. So a test chooses among all orders that a real network may produce. A network with a rate
delivers in order instead, each message or block after the time that its bytes take, while the clock is advanced."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES, Done, LinkHandler, Peer
from kvferry.protocol.errors import NodeLost


@dataclass(slots=True)
class Posted:
    """One posted send or receive."""

    link: LoopbackLink
    peer: Peer
    buffer: Any
    done: Done


class LoopbackNetwork:
    """Event lanes, clock and links by address. rate: bytes per second in each direction of a connection."""

    def __init__(self, rate: float = math.inf) -> None:
        self.now = 0.0
        self.rate = rate
        self.links: dict[str, LoopbackLink] = {}
        self._lanes: dict[Hashable, deque[Callable[[], None]]] = {}
        self._timers: list[tuple[float, int, LoopbackLink, Callable[[], None]]] = []
        self.serial = itertools.count(1)

    def clock(self) -> float:
        """Return the network's time, in seconds."""
        return self.now

    def link(self, address: str) -> LoopbackLink:
        """Return a new link with this address."""
        return LoopbackLink(self, address)

    @property
    def pending(self) -> int:
        """Return the number of lanes with an event to run."""
        return len(self._lanes)

    def step(self, choice: int = 0) -> None:
        """Run the first event of one lane, chosen by `choice` modulo their number."""
        lane = list(self._lanes)[choice % len(self._lanes)]
        queue = self._lanes[lane]
        event = queue.popleft()
        if not queue:
            del self._lanes[lane]
        event()

    def run(self) -> None:
        """Run events, oldest lane first, until none is left."""
        while self._lanes:
            self.step()

    def advance(self, seconds: float) -> None:
        """Move the clock, and run the timers that come due in order, each with all events that follow."""
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            self.now, _, link, call = heapq.heappop(self._timers)
            link.submit(call)
            self.run()
        self.now = until

    def post(self, lane: Hashable, event: Callable[[], None]) -> None:
        """Append an event to a lane."""
        self._lanes.setdefault(lane, deque()).append(event)

    def timer(self, delay_s: float, link: LoopbackLink, call: Callable[[], None]) -> None:
        """Submit `call` to the link after a delay."""
        heapq.heappush(self._timers, (self.now + delay_s, next(self.serial), link, call))


@dataclass(slots=True)
class End:
    """One link's side of a connection: the other side, and posted blocks by tag."""

    link: LoopbackLink
    peer: Peer
    other: End | None = None
    sends: dict[int, deque[Posted]] = field(default_factory=dict)
    receives: dict[int, deque[Posted]] = field(default_factory=dict)
    lost: bool = False
    free_at: float = 0.0

    def busy(self, num_bytes: int) -> float:
        """Return the seconds until these bytes have arrived, after all that was sent before."""
        network = self.link._network
        self.free_at = max(self.free_at, network.now) + num_bytes / network.rate
        return self.free_at - network.now

    def take_all(self) -> list[Posted]:
        """Remove and return all posted blocks."""
        posted = [p for queues in (self.sends, self.receives) for queue in queues.values() for p in queue]
        self.sends.clear()
        self.receives.clear()
        return posted


class LoopbackLink:
    """Implements kv_transfer.link.Link on a LoopbackNetwork."""

    def __init__(self, network: LoopbackNetwork, address: str):
        self._network, self._address = network, address
        self._ends: dict[Peer, End] = {}
        self.alive = False

    @property
    def address(self) -> str:
        return self._address

    def start(self, handler: LinkHandler) -> None:
        self.handler = handler
        self.alive = True
        self._network.links[self._address] = self

    def stop(self) -> None:
        """Close all connections, and run the events that follow, like the real link."""
        for peer in tuple(self._ends):
            self._lose(peer, NodeLost(f"{peer}: link stopped"))
        self._network.run()
        self.kill()

    def kill(self) -> None:
        """End the process without notice: its events never run, and each peer loses it by an event."""
        self.alive = False
        self._network.links.pop(self._address, None)
        for end in tuple(self._ends.values()):
            self._sever(end)
        self._ends.clear()

    def submit(self, call: Callable[[], None]) -> None:
        self._event(("commands", self._address), call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._network.timer(delay_s, self, call)

    def connect(self, address: str) -> Peer:
        end = End(self, f"{address}#{next(self._network.serial)}")
        self._ends[end.peer] = end
        target = self._network.links.get(address)
        if target is None:
            error = NodeLost(f"cannot reach {address}")
            self._event(("loss", end.peer), lambda: self._lose(end.peer, error))
        else:
            other = End(target, f"accepted#{next(self._network.serial)}", end)
            end.other = other
            target._ends[other.peer] = other
        return end.peer

    def send(self, peer: Peer, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE_BYTES, len(data)
        end = self._ends.get(peer)
        if end is None or end.lost or end.other is None:
            return
        other = end.other

        def arrive() -> None:
            if other.link._ends.get(other.peer) is other and not other.lost:
                other.link.handler.message(other.peer, data)

        if math.isinf(self._network.rate):
            other.link._event(("control", other.peer), arrive)
        else:
            self._network.timer(end.busy(len(data)), other.link, arrive)

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, tag, Posted(self, peer, buffer, done), send=True)

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._post(peer, tag, Posted(self, peer, buffer, done), send=False)

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        end = self._ends.pop(peer, None)
        error = NodeLost(f"{peer}: disconnected")
        if end is not None:
            for posted in end.take_all():
                self._complete(posted, error)
            self._sever(end)
        self._event(("done", self._address), quiet)

    def _event(self, lane: Hashable, call: Callable[[], None]) -> None:
        """Post an event of this link's thread, which is skipped if the link is killed before its turn."""
        self._network.post(lane, lambda: call() if self.alive else None)

    def _complete(self, posted: Posted, error: Exception | None) -> None:
        self._event(("done", self._address), lambda: posted.done(error))

    def _post(self, peer: Peer, tag: int, posted: Posted, send: bool) -> None:
        end = self._ends.get(peer)
        if end is None or end.lost:
            self._complete(posted, NodeLost(f"{peer}: not connected"))
            return
        (end.sends if send else end.receives).setdefault(tag, deque()).append(posted)
        if end.other is not None:
            source, target = (end, end.other) if send else (end.other, end)
            if not source.sends.get(tag) or not target.receives.get(tag):
                return
            arrive = partial(self._transfer, source, target, tag)
            if math.isinf(self._network.rate):
                self._network.post(("block", next(self._network.serial)), arrive)
            else:
                self._network.timer(source.busy(memoryview(source.sends[tag][0].buffer).nbytes), target.link, arrive)

    def _transfer(self, source: End, target: End, tag: int) -> None:
        """Copy the oldest send of the tag into the oldest receive, if both are still posted."""
        if not source.sends.get(tag) or not target.receives.get(tag):
            return
        sent, received = source.sends[tag].popleft(), target.receives[tag].popleft()
        data = np.frombuffer(sent.buffer, dtype=np.uint8)
        np.frombuffer(received.buffer, dtype=np.uint8)[: data.size] = data
        source.link._complete(sent, None)
        target.link._complete(received, None)

    def _sever(self, end: End) -> None:
        other, end.other = end.other, None
        if other is not None:
            other.other = None
            error = NodeLost(f"{other.peer}: connection closed by the peer")
            other.link._event(("loss", other.peer), lambda: other.link._lose(other.peer, error))

    def _lose(self, peer: Peer, error: NodeLost) -> None:
        end = self._ends.get(peer)
        if end is None or end.lost:
            return
        end.lost = True
        for posted in end.take_all():
            self._complete(posted, error)
        self.handler.peer_lost(peer, error)
