"""DeltaQueue: passes tokens from nodes' streams to requests, first tokens at once and others in short slices.

A read from a busy node's stream holds thousands of tokens. Handled at once, they would keep the event loop for tens of
milliseconds, several times between a request and its first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvferry.protocol.frames import join
from kvferry.protocol.messages import StepFrame, TokenDelta
from kvferry.router.nodes.node_entry import NodeEntry

SLICE_S = 0.001
"""Shortest slice, in seconds."""
SLICE_SHARE = 0.25
"""Length of a slice as a share of the time since the last one ended, so that a busy loop still streams."""
MOST_SLICE_S = 0.005
"""Longest slice, in seconds."""

FEW = 8
"""Maximum number of deltas of a frame that a router which keeps up passes on at once."""


class DeltaQueue:
    """Deltas of one router's token streams, from their frames to the listeners, on the event loop.

    A request's first delta, and everything else that its dispatch waits for, is passed on within the call, and so is a
    small frame while the router keeps up. Other deltas wait for the next slice. Those of one request that wait together
    become one delta: text and events are made once.
    The order within a request is kept."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._held: dict[str, tuple[NodeEntry, list[TokenDelta]]] = {}
        self._turn: asyncio.Handle | None = None
        self._ended = clock()

    def deal(self, entry: NodeEntry, frame: StepFrame) -> None:
        """Take a frame of the node's stream."""
        held = self._held
        at_once = not held and len(frame.deltas) <= FEW and self._clock() - self._ended >= SLICE_S
        for delta in frame.deltas:
            name = delta.request_id
            waiting = held.get(name)
            if waiting is not None and waiting[0] is entry:
                waiting[1].append(delta)
                continue
            if waiting is not None:  # another node's
                self._pass(name)
            if at_once or delta.index == 0 or delta.reuse is not None:
                _deliver(entry, delta)
            else:
                held[name] = (entry, [delta])
        for failure in frame.failed:
            self._pass(failure.request_id)
        if at_once and frame.deltas:
            self._ended = self._clock()
        if held and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._slice)
        entry.deal(frame)

    def flush(self) -> None:
        """Pass everything on, since a node's stream ends and its listeners must get all that arrived."""
        for name in list(self._held):
            self._pass(name)

    def _slice(self) -> None:
        self._turn = None
        now = self._clock()
        ends = now + min(MOST_SLICE_S, max(SLICE_S, SLICE_SHARE * (now - self._ended)))
        while self._held and now < ends:
            self._pass(next(iter(self._held)))
            now = self._clock()
        self._ended = now
        if self._held:
            self._turn = asyncio.get_running_loop().call_soon(self._slice)

    def _pass(self, name: str) -> None:
        waiting = self._held.pop(name, None)
        if waiting is not None:
            entry, deltas = waiting
            for delta in deltas if len(deltas) == 1 else joined(deltas):
                _deliver(entry, delta)


def _deliver(entry: NodeEntry, delta: TokenDelta) -> None:
    if listener := entry.listeners.get(delta.request_id):
        listener.delta(delta)


def joined(deltas: list[TokenDelta]) -> Sequence[TokenDelta]:
    """Join consecutive deltas of an attempt into one; return them unchanged if that would lose anything."""
    one = join(deltas)
    return joined_by_python(deltas) if one is None else (one,)


def joined_by_python(deltas: Sequence[TokenDelta]) -> Sequence[TokenDelta]:
    """Return what `joined` does."""
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
