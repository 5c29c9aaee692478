"""Canary checks: a decode node recomputes a sample of the prompts that it received and compares the results.

Checksums show that blocks arrived as they were sent, but not that they were right when sent. A node that computes
wrongly (other weights than its fingerprint says, another rope, bad memory) produces text that only reads oddly. So for
some transfers the node recomputes the whole prompt in blocks of its own. It compares block by block, then the next
token's logits, once after its own blocks and once with the received blocks among them, so that only these can make a
difference. For a greedy request it compares the first token, too. Of a model with recurrent layers it also compares the
received state with the one that it recomputes, and each logits follow the state of their side.

Transfers of a sender are checked until one agrees, and again after one that differs: the first transfers find a
misconfigured node. Of later transfers a share is drawn, except those computed with an adapter or with media. A check
does not find errors that reach later requests by prefix reuse.

Nothing waits for a check. It runs while the engine is idle, in pieces that stop between two layers when work arrives.
A check that is BUSY_S old runs beside the streams in small pieces, for one part in IDLE_FACTOR of the time. It
is dropped if blocks become scarce or it takes too long."""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from kvferry.engine.block_interfaces import CANARY
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.canary_check import CanaryCheck, Computes, draws_likeliest
from kvferry.engine.canary_state import CanaryStates, CheckedState
from kvferry.engine.events import BlocksChanged, CanaryChecked, Event
from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing
from kvferry.engine.request import Key, Request
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.process_names import NodeName

log = logging.getLogger("kvferry.engine")

CHUNK_TOKENS = 64
"""Tokens computed at once while the engine is idle."""
BESIDE_TOKENS = 16
"""Tokens computed at once beside streams, which takes about as long as their step."""
BUSY_S = 5.0
"""Age at which a check no longer waits for an idle engine, in seconds."""
MAX_S = 120.0
"""Age at which a check is dropped, in seconds."""
IDLE_FACTOR = 64
"""Pause after a piece beside streams, as a multiple of the piece's duration."""
RESERVE_DIVISOR = 4
"""1/RESERVE_DIVISOR of the pool's blocks stays available during a check."""
MAX_SENDERS = 4096
"""Maximum number of senders remembered as having agreed."""


class Canary:
    """Canary checks of one engine, one at a time. Owned by the engine thread.

    rate: share of transfers that are checked. tolerated: see engine.output_tolerance. states: rows for recurrent
    states, of a model that has them."""

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
        states: CanaryStates | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._pool, self._request_table, self._runner, self._events = pool, request_table, runner, events
        self._block_size, self._rate, self._tolerated = block_size, rate, tolerated
        self._clock, self._draw = clock, draw
        self._states = states
        self._check: CanaryCheck | None = None
        self._paused_until = 0.0
        self._agreed: OrderedDict[NodeName, None] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether it holds blocks."""
        return self._check is not None

    def landed(self, request: Request, sender: NodeName) -> bool:
        """Note that a transfer brought the K/V of a request's computed tokens, from its first_block on.

        None of these blocks has been replaced by an equal one yet, and the request still has the blocks of a
        transferred recurrent state. Returns whether they are checked; the caller then registers all of them before
        `hold_chain`."""
        skipped = request.adapter is not None or request.media is not None
        if self._check is not None or skipped or not self._chosen(sender):
            return False
        known, size = request.computed_len, self._block_size
        landed = request.block_ids[request.first_block : blocks_for(known, size)]
        if not landed:
            return False
        own, state = self._own(request.key, blocks_for(known + 1, size) + 1, request.state_blocks)
        check = CanaryCheck(
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
            state,
        )
        if own is None:
            self._report(check, "dropped")
            return False
        self._pool.holds.hold(request.key, CANARY, landed if state is None else [*landed, *state.received])
        self._check = check
        return True

    def hold_chain(self, request: Request) -> None:
        """Hold the blocks before the received ones and those that replaced them, too: a chain is held as a whole."""
        check = self._check
        if check is None or check.key != request.key:
            return
        chain = request.block_ids[: check.first + len(check.landed)]
        received, held = [*chain[: check.first], *check.landed], set(check.landed)
        check.chain = [each for pair in zip(received, chain, strict=True) for each in dict.fromkeys(pair)]
        self._pool.holds.hold(check.key, CANARY, [block_id for block_id in check.chain if block_id not in held])

    @property
    def holds(self) -> list[tuple[str, Hashable]]:
        """Return (reason, owner) of the blocks that a check holds."""
        return [(CANARY, self._check.key)] if self._check is not None else []

    def yield_blocks(self) -> None:
        """Release the check's blocks if requests may need them. Called before each step and before admission."""
        check = self._check
        if check is None:
            return
        short = self._blocks_needed() > self._pool.available
        if short or not self._rows_suffice() or self._clock() > check.began + MAX_S:
            self._end(check, "dropped")

    def pause_s(self) -> float | None:
        """Return seconds until the next piece may be computed; None: there is nothing to compute."""
        if self._check is None:
            return None
        if not self._request_table:
            return 0.0
        return max(0.0, max(self._check.began + BUSY_S, self._paused_until) - self._clock())

    def turn(self, keep_going: KeepGoing) -> None:
        """Compute the next piece if one is due. keep_going: called between layers."""
        check = self._check
        if check is None or self.pause_s():
            return
        began = self._clock()
        try:
            ended = check.advance(self._runner, BESIDE_TOKENS if self._request_table else CHUNK_TOKENS, keep_going)
            if check.distance > self._tolerated:
                self._end(check, "differed")
            elif ended:
                self._end(check, "agreed")
        except ForwardAbandoned:
            pass
        except DeviceLost:
            raise
        except Exception:
            log.exception("the canary cannot recompute the prompt of %s", check.key)
            self._end(check, "dropped")
        now = self._clock()
        self._paused_until = now + IDLE_FACTOR * (now - began)

    def _chosen(self, sender: NodeName) -> bool:
        return sender not in self._agreed or self._draw() < self._rate

    def _blocks_needed(self) -> int:
        """Return the number of blocks that present requests may take next."""
        size, here = self._block_size, self._request_table
        queued = sum(blocks_for(len(r.token_ids) + r.job.ahead, size) for r in here.waiting)
        return queued + len(here.running) + len(here.awaiting)

    def _rows_needed(self) -> int:
        """Return the number of present requests that have no rows for their recurrent states yet."""
        here = self._request_table
        return sum(request.state_rows is None for request in (*here.waiting, *here.awaiting.values()))

    def _rows_suffice(self) -> bool:
        return self._states is None or self._states.enough_for(self._rows_needed())

    def _own(self, key: Key, count: int, received: Sequence[int]) -> tuple[list[int] | None, CheckedState | None]:
        """Take `count` blocks and a state for a check, unless requests may need them; no blocks: both lack."""
        state = None
        if self._states is not None:
            state = self._states.open(received, self._rows_needed())
            if state is None:
                return None, None
        keep = max(self._pool.num_blocks // RESERVE_DIVISOR, self._blocks_needed())
        own = self._pool.acquire(key, CANARY, [], count, keep=keep)
        if own is None and self._states is not None and state is not None:
            self._states.close(state)
        return own, state

    def _end(self, check: CanaryCheck, outcome: str) -> None:
        self._check = None
        if outcome == "differed":
            self._pool.forget(check.landed)
            stored, removed = self._pool.changes.drain()
            self._events.append(BlocksChanged(stored, removed))
        state, held = check.state, [*check.chain, *check.own]
        self._pool.release(check.key, CANARY, held if state is None else [*held, *state.received])
        if self._states is not None and state is not None:
            self._states.close(state)
        if outcome == "agreed":
            self._agreed[check.sender] = None
            if len(self._agreed) > MAX_SENDERS:
                self._agreed.popitem(last=False)
        elif outcome == "differed":
            self._agreed.pop(check.sender, None)
        self._report(check, outcome)

    def _report(self, check: CanaryCheck, outcome: str) -> None:
        key, router, known, distance = check.key, check.router_id, check.known, check.distance
        self._events.append(CanaryChecked(key, router, check.sender, outcome, known, distance, self._tolerated))
