"""DeltaQueue: passes tokens from nodes' streams to requests, first tokens at once and later ones in short slices.

A read from a busy node's stream holds thousands of tokens. Handled at once, they would block the event loop for tens of
milliseconds, several times between a request and its first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvferry.protocol.frames import join
from kvferry.protocol.messages import StepFrame, TokenDelta
from kvferry.router.nodes.node_entry import NodeEntry

MIN_SLICE_S = 0.001
"""Shortest slice of work on the event loop, in seconds."""
SLICE_SHARE = 0.25
"""Length of a slice as a share of the time since the previous slice, so that a busy loop still streams."""
MAX_SLICE_S = 0.005
"""Longest slice, in seconds."""

SMALL_FRAME = 8
"""Largest frame that is delivered at once while the router keeps up, in deltas."""


class DeltaQueue:
    """Deltas of one router's token streams, from their frames to the listeners, on the event loop.

    `deal` delivers a request's first delta, and everything else that its dispatch waits for, and also a small frame
    while the router keeps up. Other deltas wait for the next slice. Waiting deltas of one request become one delta, so
    that its text and event are made once. The order within a request is kept."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[str, tuple[NodeEntry, list[TokenDelta]]] = {}
        self._next_slice: asyncio.Handle | None = None
        self._ended = clock()

    def deal(self, entry: NodeEntry, frame: StepFrame) -> None:
        """Take a frame of the node's stream."""
        queued = self._waiting
        at_once = not queued and len(frame.deltas) <= SMALL_FRAME and self._clock() - self._ended >= MIN_SLICE_S
        for delta in frame.deltas:
            name = delta.request_id
            waiting = queued.get(name)
            if waiting is not None and waiting[0] is entry:
                waiting[1].append(delta)
                continue
            if waiting is not None:  # it is from another node
                self._deliver_request(name)
            if at_once or delta.index == 0 or delta.reuse is not None:
                _deliver(entry, delta)
            else:
                queued[name] = (entry, [delta])
        for failure in frame.failed:
            self._deliver_request(failure.request_id)
        if at_once and frame.deltas:
            self._ended = self._clock()
        if queued and self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_soon(self._slice)
        entry.deal(frame)

    def flush(self) -> None:
        """Deliver all waiting deltas, before a node's stream ends."""
        for name in list(self._waiting):
            self._deliver_request(name)

    def _slice(self) -> None:
        self._next_slice = None
        now = self._clock()
        ends = now + min(MAX_SLICE_S, max(MIN_SLICE_S, SLICE_SHARE * (now - self._ended)))
        while self._waiting and now < ends:
            self._deliver_request(next(iter(self._waiting)))
            now = self._clock()
        self._ended = now
        if self._waiting:
            self._next_slice = asyncio.get_running_loop().call_soon(self._slice)

    def _deliver_request(self, name: str) -> None:
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            entry, deltas = waiting
            for delta in deltas if len(deltas) == 1 else joined(deltas):
                _deliver(entry, delta)


def _deliver(entry: NodeEntry, delta: TokenDelta) -> None:
    if listener := entry.listeners.get(delta.request_id):
        listener.delta(delta)


def joined(deltas: list[TokenDelta]) -> Sequence[TokenDelta]:
    """Join consecutive deltas of an attempt into one; return them unchanged if information would be lost."""
    one = join(deltas)
    return joined_by_python(deltas) if one is None else (one,)


def joined_by_python(deltas: Sequence[TokenDelta]) -> Sequence[TokenDelta]:
    """Return the result of `joined`, without the compiled function."""
    for before, after in pairwise(deltas):
        if (
            after.index != before.index + len(before.token_ids)
            or after.attempt != before.attempt
            or before.finish_reason is not None
            or (after.logprobs is None) is not (before.logprobs is None)
            or after.reuse is not None
            or after.prompt_logprobs is not None
            or after.vector is not None
        ):
            return deltas
    first, last = deltas[0], deltas[-1]
    return (
        TokenDelta(
            first.request_id,
            first.attempt,
            first.index,
            tuple(token for each in deltas for token in each.token_ids),
            None if first.logprobs is None else tuple(row for each in deltas for row in each.logprobs or ()),
            last.finish_reason,
            last.stop_token,
            first.reuse,
            first.prompt_logprobs,
            first.vector,
        ),
    )
