"""What runs in the next step: one token budget for decodes and prefill chunks, admission, preemption.

Decodes come first, one token each; prefill chunks share what is left, and while any stream is running no more than
`max_prefill_tokens_while_decoding`, so that a long prompt never stalls it. A request that cannot grow preempts the one
that arrived last, which is recomputed later (its blocks stay findable until they are needed).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.ports import GRANT, REQUEST, SHIP
from engine.request import Key, Request, Reservation, key_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step (tokens, sequences); see WorkerSettings."""

    max_num_batched_tokens: int
    max_prefill_tokens_while_decoding: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of a request from `start` on, computed in this step; `samples`: they are its last ones, so the
    next token is drawn."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.request.token_ids)


class Scheduler:
    """Queue and running set. Owned by the engine thread."""

    def __init__(self, pool: BlockPool, block_size: int, limits: Limits) -> None:
        self.pool = pool
        self.block_size = block_size
        self.limits = limits
        self.waiting: deque[Request | Reservation] = deque()
        self.running: list[Request] = []
        self.reserved: dict[object, Reservation] = {}
        self.newly_admitted: list[Request] = []
        self.newly_reserved: list[Reservation] = []
        self.preempted_total = 0

    def has_work(self) -> bool:
        return bool(self.running) or bool(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are queued or begun and not yet computed."""
        queued = sum(len(e.token_ids) for e in self.waiting if isinstance(e, Request))
        return queued + sum(r.uncomputed for r in self.running if r.uncomputed > 1)

    def schedule(self) -> list[Slice]:
        """The next step's slices, decodes first; empty when nothing can run."""
        decodes = self._grow_decodes()
        budget = self.limits.max_num_batched_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.limits.max_prefill_tokens_while_decoding)
        self._admit(budget)
        decoding = {id(s.request) for s in decodes}
        chunks: list[Slice] = []
        for request in self.running:
            if budget <= 0:
                break
            if id(request) not in decoding:
                count = min(request.uncomputed, budget)
                budget -= count
                chunks.append(Slice(request, request.computed_len, count))
        chunks.sort(key=lambda s: s.count > 1)
        return decodes + chunks

    def start(self, reservation: Reservation) -> Request:
        """The reservation's blocks have landed: its request holds them from now on and runs."""
        request = self.reserved.pop(reservation.owner).request
        self.pool.holds.hold(request.key, REQUEST, request.block_ids)
        self.pool.release(reservation.owner, GRANT, request.block_ids)
        self.running.append(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was cancelled and give up its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.release(request.key, REQUEST, request.block_ids)
        request.block_ids = []

    def knows(self, key: Key) -> bool:
        """Whether that attempt is queued, reserved or running."""
        entries = (*self.running, *self.waiting, *self.reserved.values())
        return any(key_of(entry.job) == key for entry in entries)

    def _grow_decodes(self) -> list[Slice]:
        decodes: list[Slice] = []
        for request in list(self.running):
            if request.uncomputed != 1 or request not in self.running:
                continue
            if self._grow(request):
                decodes.append(Slice(request, request.computed_len, 1))
        kept = set(map(id, self.running))
        return [s for s in decodes if id(s.request) in kept][: self.limits.max_num_batched_tokens]

    def _grow(self, request: Request) -> bool:
        """Make room for the request's next token; False if it had to give way itself."""
        missing = -(-len(request.token_ids) // self.block_size) - len(request.block_ids)
        while missing > 0:
            more = self.pool.acquire(request.key, REQUEST, [], missing)
            if more is not None:
                request.block_ids.extend(more)
                return True
            victim = max(self.running, key=lambda r: r.arrived)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and queue it first, to be recomputed."""
        assert request.transfer is None, "a request that ships holds all its blocks from the start"
        self.running.remove(request)
        self.pool.release(request.key, REQUEST, request.block_ids)
        request.block_ids = []
        request.computed_len = request.registered = 0
        request.prompt_logprobs.clear()
        self.waiting.appendleft(request)
        self.preempted_total += 1

    def _admit(self, budget: int) -> None:
        """Take entries from the queue in order while there is room (a prefill also needs budget)."""
        while self.waiting and len(self.running) + len(self.reserved) < self.limits.max_num_seqs:
            entry = self.waiting[0]
            request = entry if isinstance(entry, Request) else entry.request
            if isinstance(entry, Request) and budget <= 0:
                return
            reused = self.pool.match(request.reusable_hashes)
            fresh = -(-len(request.token_ids) // self.block_size) - len(reused)
            owner, reason = (request.key, REQUEST) if isinstance(entry, Request) else (entry.owner, GRANT)
            block_ids = self.pool.acquire(owner, reason, reused, fresh)
            if block_ids is None:
                return
            self.waiting.popleft()
            request.block_ids = block_ids
            request.computed_len = len(reused) * self.block_size
            request.registered = len(reused)
            if isinstance(entry, Reservation):
                entry.first_block = len(reused)
                self.reserved[entry.owner] = entry
                self.newly_reserved.append(entry)
                continue
            budget -= request.uncomputed
            self.running.append(request)
            if request.admitted is None:
                request.admitted = time.monotonic()
                request.cached_len = request.computed_len
                self.newly_admitted.append(request)
            if request.transfer is not None:
                self.pool.holds.hold(("ship", request.transfer), SHIP, block_ids)
