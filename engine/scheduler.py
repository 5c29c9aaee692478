"""Continuous-batching scheduler: one token budget for decodes and prefill chunks, admission and preemption.

Decodes come first, one token each. Prefill chunks share the rest, and only a little of it while any stream is running,
so that a long prompt never stalls a stream (see Budget). A request that cannot grow preempts one that has no output
yet, or else the one that arrived last. A preempted request is recomputed later; its blocks stay findable until they are
needed. Streams that came here from a lost node are preempted last.

`Request.place` orders admission and computation: streams that began, then prompts by fair queuing (see RequestTable). A
prompt is admitted when those before it leave budget for it: the later the cache is searched, the more is found. It also
waits while another prompt computes a beginning that they share. A request whose prompt arrives by a grant needs no
budget and may pass prompts that wait for budget; it waits while prompts that have not arrived yet hold many blocks. No
request passes one that waits for blocks, and none takes the blocks that a passed request will need. Streams that began
elsewhere have some reserved seats and blocks that new requests may not use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from kvferry.engine.auxiliary_blocks import AuxiliaryBlocks
from kvferry.engine.block_assignment import BlockAssignment
from kvferry.engine.block_interfaces import REQUEST, SHIP
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Budget, Limits
from kvferry.engine.deadlock_check import require_progress
from kvferry.engine.media.media_requests import MediaRequests
from kvferry.engine.media.request_media import RequestMedia
from kvferry.engine.request import Place, Request, coming, grows, held_blocks, held_up, preemption_key, resumed
from kvferry.engine.request_states import Awaits, State
from kvferry.engine.request_table import PLACE, RequestTable, arriving, share, suspend
from kvferry.engine.step_slices import Slice, chunks_of

RESERVE_DIVISOR = 32
"""1/RESERVE_DIVISOR of the seats and blocks is reserved for streams that arrive in the middle."""
ARRIVING = 4
"""At most one block of ARRIVING is held for new prompts that arrive by grants; blocks are idle until those come."""


class Scheduler:
    """Assigns blocks and seats to requests.

    refused: the next request, if it lacks them. The engine thread owns it."""

    def __init__(
        self,
        pool: BlockPool,
        request_table: RequestTable,
        block_size: int,
        limits: Limits,
        copy_block: Callable[[int, int], None],
        states: AuxiliaryBlocks | None = None,
        media: MediaRequests | None = None,
    ) -> None:
        self.pool = pool
        self.media = media or MediaRequests()
        self.request_table = request_table
        self.limits = limits
        self.budget = Budget(limits)
        self.blocks = BlockAssignment(pool, block_size, copy_block, states)
        self.newly_admitted: list[Request] = []
        self.preempted_total = 0
        self.refused: Request | None = None

    def enqueue(self, request: Request) -> None:
        """Add an attempt that is not here yet."""
        self._expect(request)
        self.request_table.enter(request)

    def schedule(self, before: Place | None = None) -> list[Slice]:
        """Return the next step's slices, decodes first; empty when nothing can run.

        before: schedule only prompts that come before that place, and nothing if there are none."""
        decodes = self._grow_decodes()
        budget = self.budget.tokens(len(decodes), chain(self.request_table.running, self.request_table.waiting))
        prompts = sorted((r for r in self.request_table.running if not r.decodes), key=PLACE)
        begun = self._admit(budget, prompts)
        order = [r for r in sorted(prompts + begun, key=PLACE) if before is None or r.place < before]
        states = self.blocks.states
        if states is not None:
            order = self._proceeding(order, states)
            decodes = [s for s in decodes if s.request.block_ids]
        chunks = chunks_of(order, budget, whole=self.limits.whole, stop=None if states is None else states.stop)
        if before is not None and not chunks:
            return []
        if states is not None and not (decodes or chunks):
            require_progress(self.request_table, self.blocks)
        chunks.sort(key=lambda s: not s.decodes)
        share(self.request_table, len(decodes) + sum(s.count for s in chunks), len(order))
        return decodes + chunks

    def admit_grants(self) -> None:
        """Assign blocks to requests whose prompts arrive by grants, without a step.

        They may pass only prompts that wait for budget."""
        self._admit(0, [])

    def land(self, request: Request) -> None:
        """Give the request the blocks that its grant filled, and let it continue."""
        self.pool.holds.hold(request.key, REQUEST, held_blocks(request))
        self.pool.release(*request.holder, held_blocks(request))
        self.request_table.landed(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or is dropped, and release its blocks except those that the link may touch."""
        self.request_table.leave(request)
        self.blocks.release(request)
        if request.state is State.DONE:
            request.block_ids, request.state_blocks = [], []

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and queue it first, to be recomputed."""
        assert request.transfer is None, "a request that transfers its blocks must hold all of them from the start"
        self.blocks.release(request)
        request.block_ids, request.state_blocks = [], []
        request.computed_len = request.registered = 0
        request.prompt_logprobs.clear()
        request.pooled = None
        self._expect(request)
        request.queued = time.monotonic()
        self.request_table.preempt(request)
        self.preempted_total += 1

    def _grow_decodes(self) -> list[Slice]:
        decodes: list[Slice] = []
        preempted = self.preempted_total
        for request in list(self.request_table.running):
            if request.decodes and not held_up(request) and request.block_ids and self._grow(request):
                decodes.append(Slice(request, request.computed_len, 1))
        if self.preempted_total > preempted:
            decodes = [s for s in decodes if s.request.block_ids]
        return decodes[: self.limits.max_num_batched_tokens]

    def _grow(self, request: Request) -> bool:
        """Make room for the request's next token; False if the request itself was preempted."""
        while not self.blocks.extend(request):
            victims = [r for r in self.request_table.running if r.transfer is None]
            if not victims:
                return False
            victim = max(victims, key=preemption_key)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _proceeding(self, prompts: Sequence[Request], states: AuxiliaryBlocks) -> list[Request]:
        """Return the prompts that have pages for a slice, after making room for one that has none."""
        able = []
        for request in prompts:
            if request.block_ids:
                self.blocks.extend(request)
                if states.stop(request) > request.computed_len or self._grow(request):
                    able.append(request)
        return [r for r in able if r.block_ids]

    def _admit(self, budget: int, prompts: Sequence[Request]) -> list[Request]:
        """Assign blocks to queued requests while blocks last and `prompts` leave budget; return those that run now.

        `prompts` are those being computed, in order. One block stays free for each stream that will grow: an admitted
        request must neither be preempted at once nor preempt others."""
        begun: list[Request] = []
        if not (waiting := self.request_table.waiting):
            return begun
        holding_blocks = self.request_table.holding_blocks
        taken = len(self.request_table.running) + len(holding_blocks)
        kept = len(holding_blocks) + sum(grows(r) + self.blocks.missing(r) for r in self.request_table.running)
        before, late = list(prompts), None
        passed = 0
        while passed < len(waiting) and taken + passed < self._running_limit(waiting[passed]):
            request = waiting[passed]
            if request.media is not None and self._lacks_rows(request, request.media):
                suspend(self.request_table, passed, Awaits.MEDIA)
                self.media.request_rows(request, self.blocks.computes_from(request))
                continue
            while before and before[0].place < request.place:
                budget -= before.pop(0).uncomputed
            computed = chain(prompts, begun) if self.pool.prefix_caching else ()
            if request.grant is None and (budget <= 0 or coming(request, computed)):
                kept += self.blocks.blocks_needed(request)
                passed += 1
                continue
            if request.grant is not None and (late or self._must_wait_for_arrivals(request)):
                kept, late = kept + (0 if late else self.blocks.blocks_needed(request)), late or request
                passed += 1
                continue
            spare = 0 if request.output_len or not taken else self.pool.num_blocks // RESERVE_DIVISOR
            if not self.blocks.take(request, kept + spare):
                break
            self.request_table.admit(passed)
            taken += 1
            kept += grows(request)
            self._note_admission(request)
            if request.state is State.RUNNING:
                begun.append(request)
                budget -= request.uncomputed
        self.refused = next(iter(waiting[passed:]), late)
        return begun

    def _lacks_rows(self, request: Request, media: RequestMedia) -> bool:
        """Return whether a request must wait for rows of media whose tokens it will compute.

        Not while its prompt arrives by a grant, or while another prompt computes a prefix that they share."""
        if request.grant is not None or not media.missing(self.blocks.computes_from(request)):
            return False
        return not (self.pool.prefix_caching and coming(request, self.request_table.running))

    def _must_wait_for_arrivals(self, request: Request) -> bool:
        """Return whether a new prompt must wait for the arrival of prompts that hold blocks already."""
        held = 0 if resumed(request) else arriving(self.request_table)
        return 0 < held > self.pool.num_blocks // ARRIVING - self.blocks.blocks_needed(request)

    def _running_limit(self, request: Request) -> int:
        """Return the limit of seats in use with this request; streams that began elsewhere may use reserved seats."""
        seats = self.limits.max_num_seqs
        return min(max_running(seats), self.limits.max_num_batched_tokens) if resumed(request) else seats

    def _note_admission(self, request: Request) -> None:
        """Record the first admission; from now on the link sends from the blocks or receives into them."""
        if request.grant is not None:
            request.first_block, request.held_for_transfer = request.registered, True
            self.pool.miss_reasons.note(request.hashes[request.registered :], "not_arrived")
        elif request.admitted is not None:
            return
        else:
            request.missed = self.pool.miss_reasons.missed(request)
            self.pool.miss_reasons.note(request.hashes[request.registered :], "computing")
        request.admitted = time.monotonic()
        request.cached_len = request.computed_len
        self.newly_admitted.append(request)
        if request.transfer is not None:
            request.held_for_transfer = True
            self.pool.holds.hold(("ship", request.transfer), SHIP, held_blocks(request))

    def _expect(self, request: Request) -> None:
        """Set how many tokens it will compute or its grant will bring."""
        request.lacking = len(request.token_ids) - self.blocks.cached(request)


def max_running(max_num_seqs: int) -> int:
    """Return how many requests can run at once: `max_num_seqs`, and streams in reserved seats."""
    return max_num_seqs + max(1, max_num_seqs // RESERVE_DIVISOR)
