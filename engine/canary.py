"""Canary checks: a decode node recomputes a sample of the prompts that it received and compares the results.

Checksums tell whether blocks arrived as they were sent. That they were right when they were sent nobody sees: a node
that computes wrongly (other weights than its fingerprint says, another rope, memory that went bad) makes text that only
reads oddly. So of some ships the node computes the whole prompt anew, in blocks of its own, and compares: block by
block; then the next token's logits, behind its own blocks and behind the same with the ship's among them. Anyone who
computed what stands before these, only they make a difference. Of a greedy request the first token is looked at, too.

A ship is looked at until one of its sender agrees, and after one that does not: who is set up wrongly is found by the
first ships. Of the others a share is drawn, but none that an adapter computed. What a ship brought wrong is not found
by later requests.

Nothing waits for it. It is computed while nobody is here, in pieces that end between two layers when anything comes;
where somebody is here for PATIENCE_S, beside the streams, in small pieces and for a REST-th of the time. Where blocks
grow short, or it takes too long, it is dropped.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.canary_check import CanaryCheck, Computes, draws_likeliest
from kvferry.engine.events import BlocksChanged, CanaryChecked, Event
from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned, Wanted
from kvferry.engine.ports import CANARY
from kvferry.engine.request import Request
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.process_names import NodeName

log = logging.getLogger("kvferry.engine")

PIECE, PIECE_BESIDE = 64, 16
"""Tokens computed at once: while nobody is here, and beside streams, where it lasts about as long as their step."""
PATIENCE_S, MOST_S, REST = 5.0, 120.0, 64
SPARED = 4
"""One block of so many stays available while a prompt is looked at."""
KNOWN = 4096
"""Senders of whom a ship agreed."""


class Canary:
    """One look at a time.

    rate: the share of ships that are looked at; tolerated: see engine.output_tolerance. Owned by the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        request_table: RequestTable,
        runner: Computes,
        events: list[Event],
        *,
        block_size: int,
        rate: float,
        tolerated: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._pool, self._request_table, self._runner, self._events = pool, request_table, runner, events
        self._block_size, self._rate, self._tolerated = block_size, rate, tolerated
        self._clock, self._draw = clock, draw
        self._look: CanaryCheck | None = None
        self._rests_until = 0.0
        self._agreed: OrderedDict[NodeName, None] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether it holds blocks."""
        return self._look is not None

    def landed(self, request: Request, sender: NodeName) -> None:
        """A ship brought the K/V of a request's computed tokens, from its first_block on.

        None of these blocks was exchanged for an equal one yet."""
        if self._look is not None or request.adapter is not None or not self._chosen(sender):
            return
        known, size = request.computed_len, self._block_size
        landed = request.block_ids[request.first_block : blocks_for(known, size)]
        if not landed:
            return
        keep = max(self._pool.num_blocks // SPARED, self._wanted())
        own = self._pool.acquire(request.key, CANARY, [], blocks_for(known + 1, size) + 1, keep=keep)
        look = CanaryCheck(
            request.key,
            request.job.router_id,
            sender,
            request.token_ids[: known + 1],
            request.first_block,
            landed,
            draws_likeliest(request),
            self._clock(),
            size,
            own or [],
        )
        if own is None:
            self._tell(look, "dropped")
            return
        self._pool.holds.hold(request.key, CANARY, landed)
        self._look = look

    @property
    def holds(self) -> list[tuple[str, Hashable]]:
        """(reason, owner) of what it looks at."""
        return [(CANARY, self._look.key)] if self._look is not None else []

    def give_way(self) -> None:
        """Before a step, or seats are given: it lets go of its blocks where others may need them."""
        look = self._look
        if look is None:
            return
        if self._wanted() > self._pool.available or self._clock() > look.began + MOST_S:
            self._end(look, "dropped")

    def pause_s(self) -> float | None:
        """Return seconds until the next piece may be computed; None: there is nothing to compute."""
        if self._look is None:
            return None
        if not self._request_table:
            return 0.0
        return max(0.0, max(self._look.began + PATIENCE_S, self._rests_until) - self._clock())

    def turn(self, wanted: Wanted) -> None:
        """Compute a piece, if it is time to. wanted: asked between layers whether nothing else is to be done."""
        look = self._look
        if look is None or self.pause_s():
            return
        began = self._clock()
        try:
            ended = look.go_on(self._runner, PIECE_BESIDE if self._request_table else PIECE, wanted)
            if look.distance > self._tolerated:
                self._end(look, "differed")
            elif ended:
                self._end(look, "agreed")
        except ForwardAbandoned:
            pass
        except DeviceLost:
            raise
        except Exception:
            log.exception("the prompt of %s cannot be looked at", look.key)
            self._end(look, "dropped")
        now = self._clock()
        self._rests_until = now + REST * (now - began)

    def _chosen(self, sender: NodeName) -> bool:
        return sender not in self._agreed or self._draw() < self._rate

    def _wanted(self) -> int:
        """Blocks that those who are here may take next."""
        size, here = self._block_size, self._request_table
        queued = sum(blocks_for(len(r.token_ids) + r.job.ahead, size) for r in here.waiting)
        return queued + len(here.running) + len(here.awaiting)

    def _end(self, look: CanaryCheck, outcome: str) -> None:
        self._look = None
        if outcome == "differed":
            self._pool.forget(look.landed)
            stored, removed = self._pool.changes.drain()
            self._events.append(BlocksChanged(stored, removed))
        self._pool.release(look.key, CANARY, [*look.landed, *look.own])
        if outcome == "agreed":
            self._agreed[look.sender] = None
            if len(self._agreed) > KNOWN:
                self._agreed.popitem(last=False)
        elif outcome == "differed":
            self._agreed.pop(look.sender, None)
        self._tell(look, outcome)

    def _tell(self, look: CanaryCheck, outcome: str) -> None:
        self._events.append(
            CanaryChecked(look.key, look.router_id, look.sender, outcome, look.known, look.distance, self._tolerated)
        )
