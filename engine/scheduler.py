"""What runs in the next step: one token budget for decodes and prefill chunks, admission, preemption.

Decodes come first, one token each; prefill chunks share what is left, and while any stream is running no more than
`max_prefill_tokens_while_decoding`, so that a long prompt never stalls it. A request that cannot grow preempts the one
that arrived last, which is recomputed later (its blocks stay findable until they are needed).

Admission is in order of arrival, preempted requests first. A prompt is admitted when the prompts begun before it leave
budget for it: the later it looks into the cache, the more it finds there. Reservations need no budget and may pass
prompts that wait for budget, but nobody passes an entry that waits for blocks, and nobody takes the blocks that a
passed entry will need.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.ports import GRANT, REQUEST, SHIP
from engine.request import Entry, Key, Request, Reservation
from engine.slices import Slice, chunks_of
from protocol.layout import blocks_for


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step (tokens, sequences); see WorkerSettings."""

    max_num_batched_tokens: int
    max_prefill_tokens_while_decoding: int
    max_num_seqs: int


class Scheduler:
    """Queue and running set. Owned by the engine thread."""

    def __init__(self, pool: BlockPool, block_size: int, limits: Limits) -> None:
        self.pool = pool
        self.block_size = block_size
        self.limits = limits
        self.waiting: deque[Entry] = deque()
        self.running: list[Request] = []
        self.reserved: dict[object, Reservation] = {}
        self.newly_admitted: list[Request] = []
        self.newly_reserved: list[Reservation] = []
        self.preempted_total = 0
        self._attempts: dict[str, dict[int, Entry]] = {}
        self._queued_tokens = 0

    def has_work(self) -> bool:
        return bool(self.running) or bool(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are queued or begun and not yet computed, less those found in the cache on arrival."""
        return self._queued_tokens + sum(r.uncomputed for r in self.running if not r.decodes)

    def enqueue(self, entry: Entry) -> None:
        """Add an attempt that is not `known` yet."""
        attempts = self._attempts.setdefault(entry.job.request_id, {})
        assert entry.job.attempt not in attempts, entry.key
        attempts[entry.job.attempt] = entry
        self.waiting.append(entry)
        self._count_queued(entry)

    def known(self, key: Key) -> bool:
        """Whether that attempt is queued, reserved or running."""
        return key[1] in self._attempts.get(key[0], {})

    def attempts(self, request_id: str, upto: int) -> list[Entry]:
        """What is queued, reserved or running of a request's attempts, those after `upto` left out."""
        return [entry for attempt, entry in self._attempts.get(request_id, {}).items() if attempt <= upto]

    def schedule(self) -> list[Slice]:
        """The next step's slices, decodes first; empty when nothing can run."""
        decodes = self._grow_decodes()
        budget = self.limits.max_num_batched_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.limits.max_prefill_tokens_while_decoding)
        chunks = chunks_of((r for r in self.running if not r.decodes), budget)
        begun = self._admit(budget - sum(s.count for s in chunks))
        chunks += chunks_of(begun, budget - sum(s.count for s in chunks))
        chunks.sort(key=lambda s: not s.decodes)
        return decodes + chunks

    def start(self, reservation: Reservation) -> Request:
        """The reservation's blocks have landed: its request holds them from now on and runs."""
        request = self.reserved.pop(reservation.owner).request
        self._attempts[request.job.request_id][request.job.attempt] = request
        self.pool.holds.hold(request.key, REQUEST, request.block_ids)
        self.pool.release(reservation.owner, GRANT, request.block_ids)
        self.running.append(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was cancelled and give up its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self._dequeue(request)
        self._forget(request)
        self.pool.release(request.key, REQUEST, request.block_ids)
        request.block_ids = []

    def withdraw(self, owner: object) -> Reservation | None:
        """Forget a reservation; the hold on its blocks, if it got them, stays. None when it is not here."""
        reservation = self.reserved.pop(owner, None)
        if reservation is None:
            queued = (e for e in self.waiting if isinstance(e, Reservation) and e.owner == owner)
            reservation = next(queued, None)
            if reservation is None:
                return None
            self._dequeue(reservation)
        self._forget(reservation)
        return reservation

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and queue it first, to be recomputed."""
        assert request.transfer is None, "a request that ships holds all its blocks from the start"
        self.running.remove(request)
        self.pool.release(request.key, REQUEST, request.block_ids)
        request.block_ids = []
        request.computed_len = request.registered = 0
        request.prompt_logprobs.clear()
        self.waiting.appendleft(request)
        self._count_queued(request)
        self.preempted_total += 1

    def _grow_decodes(self) -> list[Slice]:
        decodes: list[Slice] = []
        preempted = self.preempted_total
        for request in list(self.running):
            if request.decodes and request.block_ids and self._grow(request):
                decodes.append(Slice(request, request.computed_len, 1))
        if self.preempted_total > preempted:
            decodes = [s for s in decodes if s.request.block_ids]
        return decodes[: self.limits.max_num_batched_tokens]

    def _grow(self, request: Request) -> bool:
        """Make room for the request's next token; False if it had to give way itself."""
        missing = self._blocks_of(request) - len(request.block_ids)
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

    def _admit(self, budget: int) -> list[Request]:
        """Take entries from the queue while there is room; returns the requests among them. One block stays free for
        each stream that will grow: what is admitted must not be preempted at once, nor preempt others."""
        admitted: list[Request] = []
        kept = len(self.reserved) + sum(not r.prefill_only for r in self.running) if self.waiting else 0
        passed = 0
        while passed < min(len(self.waiting), self.limits.max_num_seqs - len(self.running) - len(self.reserved)):
            entry = self.waiting[passed]
            if isinstance(entry, Request) and budget <= 0:
                kept += self._blocks_of(entry)
                passed += 1
                continue
            if not self._take_blocks(entry, kept):
                break
            del self.waiting[passed]
            self._queued_tokens -= entry.expected_tokens
            if isinstance(entry, Reservation):
                self.reserved[entry.owner] = entry
                self.newly_reserved.append(entry)
                kept += 1
            else:
                self._begin(entry)
                admitted.append(entry)
                budget -= entry.uncomputed
                kept += not entry.prefill_only
        return admitted

    def _take_blocks(self, entry: Entry, kept: int) -> bool:
        """Hold the entry's whole chain, cached blocks first, unless fewer than `kept` blocks would stay available."""
        request = entry.request
        reused = self.pool.match(request.reusable_hashes)
        owner, reason = (request.key, REQUEST) if isinstance(entry, Request) else (entry.owner, GRANT)
        block_ids = self.pool.acquire(owner, reason, reused, self._blocks_of(entry) - len(reused), keep=kept)
        if block_ids is None:
            return False
        request.block_ids = block_ids
        request.computed_len = len(reused) * self.block_size
        request.registered = len(reused)
        if isinstance(entry, Reservation):
            entry.first_block = len(reused)
        return True

    def _begin(self, request: Request) -> None:
        self.running.append(request)
        if request.admitted is None:
            request.admitted = time.monotonic()
            request.cached_len = request.computed_len
            self.newly_admitted.append(request)
        if request.transfer is not None:
            self.pool.holds.hold(("ship", request.transfer), SHIP, request.block_ids)

    def _blocks_of(self, entry: Entry) -> int:
        return blocks_for(len(entry.request.token_ids), self.block_size)

    def _count_queued(self, entry: Entry) -> None:
        if isinstance(entry, Request):
            cached = len(self.pool.match(entry.reusable_hashes)) * self.block_size
            entry.expected_tokens = len(entry.token_ids) - cached
        self._queued_tokens += entry.expected_tokens

    def _dequeue(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        self._queued_tokens -= entry.expected_tokens

    def _forget(self, entry: Entry) -> None:
        attempts = self._attempts[entry.job.request_id]
        del attempts[entry.job.attempt]
        if not attempts:
            del self._attempts[entry.job.request_id]
