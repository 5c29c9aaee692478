"""Canary checks: a decode node recomputes a sample of the prompts that it received and compares the results.

Checksums show that blocks arrived as they were sent, but not that they were right when sent. A node that computes
wrongly (other weights than its fingerprint says, another rope, bad memory) produces text that only reads oddly. So for
some transfers the node recomputes the whole prompt in blocks of its own. It compares block by block, then the next
token's logits, once after its own blocks and once with the received blocks among them, so that only these can make a
difference. For a greedy request it compares the first token, too.

Transfers of a sender are checked until one agrees, and again after one that differs: the first transfers find a
misconfigured node. Of later transfers a share is drawn, except those computed with an adapter or with media. A check
does not find errors that reach later requests by prefix reuse.

Nothing waits for a check. It runs while the engine is idle, in pieces that stop between two layers when work arrives.
If requests are present for BUSY_S, it runs beside the streams in small pieces, for one part in IDLE_FACTOR of the time.
It is dropped if blocks become scarce or it takes too long."""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvferry.engine.block_interfaces import CANARY
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.canary_check import CanaryCheck, Computes, draws_likeliest
from kvferry.engine.events import BlocksChanged, CanaryChecked, Event
from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned, Wanted
from kvferry.engine.request import Request
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.process_names import NodeName

log = logging.getLogger("kvferry.engine")

CHUNK_TOKENS, CHUNK_TOKENS_BESIDE = 64, 16
"""Tokens computed at once: while the engine is idle, and beside streams, where it takes about as long as their step."""
BUSY_S, MAX_S, IDLE_FACTOR = 5.0, 120.0, 64
RESERVE_DIVISOR = 4
"""One of this many blocks stays available during a check."""
KNOWN = 4096
"""Maximum number of senders remembered as having agreed."""


class Canary:
    """Canary checks of one engine, one at a time. Owned by the engine thread.

    rate: share of transfers that are checked. tolerated: see engine.output_tolerance."""

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
        self._paused_until = 0.0
        self._agreed: OrderedDict[NodeName, None] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether it holds blocks."""
        return self._look is not None

    def landed(self, request: Request, sender: NodeName) -> bool:
        """Note that a transfer brought the K/V of a request's computed tokens, from its first_block on.

        None of these blocks has been replaced by an equal one yet. Returns whether they are checked; the caller then
        registers all of them before `hold_chain`."""
        skipped = request.adapter is not None or request.media is not None
        if self._look is not None or skipped or not self._chosen(sender):
            return False
        known, size = request.computed_len, self._block_size
        landed = request.block_ids[request.first_block : blocks_for(known, size)]
        if not landed:
            return False
        keep = max(self._pool.num_blocks // RESERVE_DIVISOR, self._wanted())
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
            landed,
        )
        if own is None:
            self._tell(look, "dropped")
            return False
        self._pool.holds.hold(request.key, CANARY, landed)
        self._look = look
        return True

    def hold_chain(self, request: Request) -> None:
        """Hold the blocks before the received ones and those that replaced them, too: a chain is held as a whole."""
        look = self._look
        if look is None or look.key != request.key:
            return
        chain = request.block_ids[: look.first + len(look.landed)]
        received, held = [*chain[: look.first], *look.landed], set(look.landed)
        look.chain = [each for pair in zip(received, chain, strict=True) for each in dict.fromkeys(pair)]
        self._pool.holds.hold(look.key, CANARY, [block_id for block_id in look.chain if block_id not in held])

    @property
    def holds(self) -> list[tuple[str, Hashable]]:
        """Return (reason, owner) of the blocks that a check holds."""
        return [(CANARY, self._look.key)] if self._look is not None else []

    def yield_blocks(self) -> None:
        """Release the check's blocks if requests may need them. Called before each step and before admission."""
        look = self._look
        if look is None:
            return
        if self._wanted() > self._pool.available or self._clock() > look.began + MAX_S:
            self._end(look, "dropped")

    def pause_s(self) -> float | None:
        """Return seconds until the next piece may be computed; None: there is nothing to compute."""
        if self._look is None:
            return None
        if not self._request_table:
            return 0.0
        return max(0.0, max(self._look.began + BUSY_S, self._paused_until) - self._clock())

    def turn(self, wanted: Wanted) -> None:
        """Compute a piece, if it is time to. wanted: returns, between layers, whether the check may continue."""
        look = self._look
        if look is None or self.pause_s():
            return
        began = self._clock()
        try:
            ended = look.go_on(self._runner, CHUNK_TOKENS_BESIDE if self._request_table else CHUNK_TOKENS, wanted)
            if look.distance > self._tolerated:
                self._end(look, "differed")
            elif ended:
                self._end(look, "agreed")
        except ForwardAbandoned:
            pass
        except DeviceLost:
            raise
        except Exception:
            log.exception("the canary cannot recompute the prompt of %s", look.key)
            self._end(look, "dropped")
        now = self._clock()
        self._paused_until = now + IDLE_FACTOR * (now - began)

    def _chosen(self, sender: NodeName) -> bool:
        return sender not in self._agreed or self._draw() < self._rate

    def _wanted(self) -> int:
        """Return the number of blocks that present requests may take next."""
        size, here = self._block_size, self._request_table
        queued = sum(blocks_for(len(r.token_ids) + r.job.ahead, size) for r in here.waiting)
        return queued + len(here.running) + len(here.awaiting)

    def _end(self, look: CanaryCheck, outcome: str) -> None:
        self._look = None
        if outcome == "differed":
            self._pool.forget(look.landed)
            stored, removed = self._pool.changes.drain()
            self._events.append(BlocksChanged(stored, removed))
        self._pool.release(look.key, CANARY, [*look.chain, *look.own])
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
