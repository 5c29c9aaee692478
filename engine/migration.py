"""OutboundMigrations: streams that a draining node hands over to another node, and the blocks held for the transfer.

A stream's blocks are held for the transfer while it runs on. It then pauses, and ends here once the other node has
taken it over; otherwise it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kvferry.engine.block_interfaces import SHIP
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.events import Event, Failed
from kvferry.engine.request import Key, Request
from kvferry.engine.request_states import Awaits, State
from kvferry.engine.request_table import pause
from kvferry.engine.scheduler import Scheduler
from kvferry.protocol.errors import GrantRefused, Moved, TransferFailed
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.media import without_data
from kvferry.protocol.messages import Job, TokenDelta

AHEAD = 64
"""Tokens that a stream may draw before it is paused, without any being recomputed."""


@dataclass(frozen=True, slots=True)
class OutboundMigration:
    """Stream that is being migrated.

    job: of the other node's attempt; its tokens are those computed when the migration began. full: number of tokens
    whose K/V is in full blocks, which are not written any more. state: blocks for its recurrent state."""

    transfer: int
    request: Request
    job: Job
    full: tuple[int, ...]
    state: tuple[int, ...] = ()

    @property
    def expected_blocks(self) -> int:
        """Return how many blocks the other node expects, besides those of the state."""
        return blocks_for(len(self.job.token_ids) + self.job.ahead, self.request.block_size)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Point at which a migrating stream is paused.

    first: output tokens that the migration's job lacks, at least one. covered: number of leading tokens whose K/V is in
    blocks that the other node expects. rest: (index, block id) of blocks after the full ones, and of those that
    follow the chain after `covered` tokens (`engine.auxiliary_blocks`)."""

    first: TokenDelta
    covered: int
    rest: tuple[tuple[int, int], ...]


class OutboundMigrations:
    """Outbound migrations by transfer, from `begin` to `quiet`. Owned by the engine thread.

    A request holds its blocks as before, and each migration holds those that it sends from. longest: length at which a
    sequence ends, in tokens."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, longest: int, events: list[Event]) -> None:
        self._pool, self._scheduler, self._request_table, self._events = (
            pool,
            scheduler,
            scheduler.request_table,
            events,
        )
        self._longest = longest
        self._open: dict[int, OutboundMigration] = {}
        self._transfer_holds: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._transfer_holds)

    @property
    def open(self) -> Collection[int]:
        """Transfers of migrations in progress."""
        return self._open.keys()

    def begin(self, key: Key, attempt: int, offer: Callable[[Job], int]) -> OutboundMigration:
        """Offer a running stream to another node as its later attempt `attempt`; `offer` returns the transfer.

        `done` or `failed`, and `quiet`, must report its end. Raises TransferFailed if the stream cannot migrate."""
        request = self._request_table.find(key)
        moves = any(move.request is request for move in self._open.values())
        if request is None or request.state is not State.RUNNING or not streams(request) or moves:
            raise TransferFailed(f"attempt {key[1]} of {key[0]} does not stream here, or is being migrated")
        known, params = request.computed_len, request.job.params
        job = replace(
            request.job,
            attempt=attempt,
            token_ids=tuple(request.token_ids[:known]),
            ahead=max(0, min(AHEAD, self._longest - 1 - known, params.max_tokens - request.output_len)),
            deadline_s=request.job.deadline_s - (time.monotonic() - request.arrived),
            fork_of="",
            newcomer=False,
            media=without_data(request.job.media),
        )
        full = tuple(request.block_ids[: known // request.block_size])
        state = self._room_for_state()
        try:
            move = OutboundMigration(offer(job), request, job, full, state)
            self._pool.holds.hold(("ship", move.transfer), SHIP, (*full, *state))
        finally:
            self._pool.release("migration", SHIP, state)
        self._open[move.transfer], self._transfer_holds[move.transfer] = move, [*full, *state]
        if self._scheduler.blocks.states is not None:
            request.pause_at = move.expected_blocks * request.block_size
        return move

    def _room_for_state(self) -> tuple[int, ...]:
        """Hold blocks for a copy of a stream's recurrent state. Raises TransferFailed if there are none."""
        states = self._scheduler.blocks.states
        if states is None or not states.reserved:
            return ()
        blocks = self._pool.acquire("migration", SHIP, [], states.reserved)
        if blocks is None:
            raise TransferFailed("the pool has no room for a copy of the stream's state")
        return tuple(blocks)

    def snapshot(self, transfer: int) -> Snapshot | None:
        """Pause the stream and return the point at which it is paused.

        None: the migration failed, or the stream ended or lost its blocks."""
        move = self._open.get(transfer)
        if move is None:
            return None
        request, known = move.request, len(move.job.token_ids)
        size, first, states = request.block_size, len(move.full), self._scheduler.blocks.states
        covered = min(request.computed_len, move.expected_blocks * size)
        if request.state is not State.RUNNING or not streams(request):
            return None
        if states is not None and covered < request.computed_len:
            return None
        pause(self._request_table, request, Awaits.HANDOVER)
        rest = request.block_ids[first : blocks_for(covered, size)]
        beside = states.sent(request, move.state) if states is not None else []
        new = [block_id for block_id in (*rest, *beside) if block_id not in self._transfer_holds[transfer]]
        self._pool.holds.hold(("ship", transfer), SHIP, new)
        self._transfer_holds[transfer] += new
        tokens = TokenDelta(*request.key, known - move.job.prompt_len, tuple(request.token_ids[known:]))
        return Snapshot(tokens, covered, (*enumerate(rest, first), *enumerate(beside, move.expected_blocks)))

    def done(self, transfer: int) -> None:
        """End the stream here, unless it has ended: the other node continues it."""
        move = self._open.pop(transfer)
        request, error = move.request, Moved("the stream continues on another node")
        error.later = move.job.attempt
        if self._request_table.find(request.key) is request:
            self._scheduler.remove(request)
            self._events.append(Failed(request.key, request.job.router_id, error))

    def failed(self, transfer: int) -> None:
        """Resume the stream here: the other node does not take it."""
        request = self._open.pop(transfer).request
        request.pause_at = None
        self._request_table.resume(request, Awaits.HANDOVER)

    def quiet(self, transfer: int) -> None:
        """Release the migration's blocks: no send touches them any more."""
        self._pool.release(("ship", transfer), SHIP, self._transfer_holds.pop(transfer))


def widen(scheduler: Scheduler, request: Request) -> None:
    """Allocate blocks for all tokens of a migrated request, which is preempted if there are not enough.

    One that came with a single token grows like every stream. Raises GrantRefused for one that cannot run yet."""
    if request.uncomputed == 1:
        return
    if scheduler.blocks.extend(request):
        return
    if request.state is State.RUNNING:
        scheduler.preempt(request)
    else:
        raise GrantRefused("the pool has no room for the tokens of the hand-over")


def streams(request: Request) -> bool:
    """Return whether the request generates here and has output already."""
    return request.decodes and request.output_here > 0 and request.transfer is None
