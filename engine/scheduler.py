"""Continuous-batching scheduler: one token budget for decodes and prefill chunks, admission and preemption.

Decodes come first, one token each. Prefill chunks share the rest, and only a little of it while any stream is running,
so that a long prompt never stalls a stream (see Budget). A request that cannot grow preempts one that has no output
yet, or else the one that arrived last. A preempted request is recomputed later; its blocks stay findable until they are
needed. Streams that came here from a lost node are preempted last.

`Request.place` orders admission and computation: streams that began, then prompts by fair queuing (see
RequestTable). A prompt is admitted when those before it leave budget for it: the later the cache is searched, the more
is found. It also waits while another prompt computes a beginning that they share. A request whose prompt arrives by a
grant needs no budget and may pass prompts that wait for budget; it waits while others hold many blocks that have not
arrived. No request passes one that waits for blocks, and none takes the blocks that a passed request will need. Streams
that began elsewhere have some reserved seats and blocks that new requests may not use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Budget, Limits
from kvferry.engine.partial_blocks import PartialBlock
from kvferry.engine.ports import REQUEST, SHIP
from kvferry.engine.request import Place, Request, coming, grows, held_up, junior, resumed
from kvferry.engine.request_states import State
from kvferry.engine.request_table import PLACE, RequestTable, arriving, share
from kvferry.engine.step_slices import Slice, chunks_of
from kvferry.protocol.layout import blocks_for

KEPT = 32
"""One seat and one block of KEPT are reserved for streams that arrive in the middle."""
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
    ) -> None:
        self.pool = pool
        self.request_table = request_table
        self.block_size = block_size
        self.limits = limits
        self.budget = Budget(limits)
        self._copy_block = copy_block
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
        chunks = chunks_of(order, budget, whole=self.limits.whole)
        if before is not None and not chunks:
            return []
        chunks.sort(key=lambda s: not s.decodes)
        share(self.request_table, len(decodes) + sum(s.count for s in chunks), len(order))
        return decodes + chunks

    def seat(self) -> None:
        """Assign blocks to requests whose prompts arrive by grants, without a step.

        They may pass only prompts that wait for budget."""
        self._admit(0, [])

    def land(self, request: Request) -> None:
        """Give the request the blocks that its grant filled, and let it continue."""
        self.pool.holds.hold(request.key, REQUEST, request.block_ids)
        self.pool.release(*request.holder, request.block_ids)
        self.request_table.landed(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or is dropped, and release its blocks except those that the link may touch."""
        self.request_table.leave(request)
        self.pool.idle.rest(request.cache_use, request.block_ids[: request.registered])
        if request.grant is None:
            self.pool.release(*request.holder, request.block_ids)
        if request.state is State.DONE:
            request.block_ids = []

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and queue it first, to be recomputed."""
        assert request.transfer is None, "a request that transfers its blocks must hold all of them from the start"
        self.pool.idle.rest(request.cache_use, request.block_ids[: request.registered])
        self.pool.release(*request.holder, request.block_ids)
        request.block_ids = []
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
        """Make room for the request's next token; False if it had to give way itself."""
        missing = self._missing(request)
        while missing > 0:
            more = self.pool.acquire(*request.holder, [], missing)
            if more is not None:
                request.block_ids.extend(more)
                return True
            victim = max(self.request_table.running, key=junior)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: int, prompts: Sequence[Request]) -> list[Request]:
        """Assign blocks to queued requests while blocks last and `prompts` leave budget; return those that run now.

        `prompts` are those being computed, in order. One block stays free for each stream that will grow: an admitted
        request must neither be preempted at once nor preempt others."""
        begun: list[Request] = []
        if not (waiting := self.request_table.waiting):
            return begun
        seated = self.request_table.seated
        taken = len(self.request_table.running) + len(seated)
        kept = len(seated) + sum(grows(r) + self._missing(r) for r in self.request_table.running)
        before, late = list(prompts), None
        passed = 0
        while passed < len(waiting) and taken + passed < self._seats(waiting[passed]):
            request = waiting[passed]
            while before and before[0].place < request.place:
                budget -= before.pop(0).uncomputed
            computed = chain(prompts, begun) if self.pool.prefix_caching else ()
            if request.grant is None and (budget <= 0 or coming(request, computed)):
                kept += self._blocks_of(request)
                passed += 1
                continue
            if request.grant is not None and (late or self._crowds(request)):
                kept, late = kept + (0 if late else self._blocks_of(request)), late or request
                passed += 1
                continue
            spare = 0 if request.output_len or not taken else self.pool.num_blocks // KEPT
            if not self._take_blocks(request, kept + spare):
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

    def _crowds(self, request: Request) -> bool:
        """Return whether a new prompt must wait until others arrive that hold blocks already."""
        held = 0 if resumed(request) else arriving(self.request_table)
        return 0 < held > self.pool.num_blocks // ARRIVING - self._blocks_of(request)

    def _seats(self, request: Request) -> int:
        """Return how many seats may be taken with this request: for streams that began elsewhere, reserved ones too."""
        most = self.limits.max_num_seqs
        return min(most + max(1, most // KEPT), self.limits.max_num_batched_tokens) if resumed(request) else most

    def _take_blocks(self, request: Request, kept: int) -> bool:
        """Hold the request's whole chain, cached blocks first, unless fewer than `kept` blocks would stay available."""
        reused = self.pool.match(request.reusable_hashes)
        tail = self._tail(request, len(reused) * self.block_size)
        block_ids = self.pool.acquire(
            *request.holder, reused, self._blocks_of(request) - len(reused), keep=kept, cache_use=request.cache_use,
            hashes=request.reusable_hashes,
        )  # fmt: skip
        if block_ids is None:
            return False
        request.block_ids = block_ids
        request.computed_len = len(reused) * self.block_size
        request.registered = len(reused)
        if tail is not None:
            self._copy_tail(request, tail)
        return True

    def _tail(self, request: Request, start: int) -> PartialBlock | None:
        """Return a partial block that shares the tokens behind `start` with other forks' prompts."""
        if not request.job.fork_of or request.grant is not None or request.job.work.whole_prompt:
            return None
        upto = min(start + self.block_size, len(request.token_ids) - 1)
        return self.pool.tails.match(request.parent_of(start), request.token_ids[start:upto])

    def _copy_tail(self, request: Request, tail: PartialBlock) -> None:
        """Copy the partial block at once, before its source is reused, and cache the copy in its place."""
        start = request.computed_len
        target = request.block_ids[start // self.block_size]
        if target != tail.block_id:
            self._copy_block(tail.block_id, target)
        request.computed_len += tail.length
        self.pool.tails.put(request.parent_of(start), request.token_ids[start : request.computed_len], target)

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
            self.pool.holds.hold(("ship", request.transfer), SHIP, request.block_ids)

    def _missing(self, request: Request) -> int:
        """Return how many blocks it takes as soon as it is scheduled."""
        return max(0, self._blocks_of(request) - len(request.block_ids))

    def _blocks_of(self, request: Request) -> int:
        ahead = request.job.ahead if request.grant is not None else 0
        return blocks_for(len(request.token_ids) + ahead, self.block_size)

    def _expect(self, request: Request) -> None:
        """Set how many tokens it will compute or its grant will bring."""
        cached = len(self.pool.match(request.reusable_hashes)) * self.block_size
        request.lacking = len(request.token_ids) - cached
