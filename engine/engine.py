"""One model on one device: takes attempts and reservations, runs steps, says what happened. No threads, no network.

Everything here is called on the engine thread. Each call and each step leaves its news in `events` for the loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from engine.block_pool import BlockPool
from engine.events import (
    Admitted,
    BlocksChanged,
    Computed,
    Event,
    Failed,
    Generated,
    ReservationFailed,
    Reserved,
    Stepped,
)
from engine.ports import GRANT, QUIESCE, REQUEST, SHIP
from engine.request import Request, Reservation, key_of
from engine.runner import Runner
from engine.sampler import Sampled
from engine.scheduler import Limits, Scheduler, Slice
from protocol.errors import Cancelled, ContextLengthExceeded, GrantRefused, InvalidRequest, KvferryError
from protocol.hashing import root_hash
from protocol.messages import Job, Load, Reuse, TokenDelta, TokenLogprobs

REMEMBERED_CANCELS = 8192


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """fingerprint roots the block hashes; max_model_len bounds prompt plus output (tokens)."""

    fingerprint: str
    block_size: int
    max_model_len: int
    limits: Limits


class Engine:
    """The arithmetic side of a node."""

    def __init__(self, config: EngineConfig, runner: Runner, pool: BlockPool) -> None:
        self.config = config
        self.runner = runner
        self.pool = pool
        self.scheduler = Scheduler(pool, config.block_size, config.limits)
        self.events: list[Event] = []
        self.longest = min(config.max_model_len, pool.num_blocks * config.block_size)
        self._ships: dict[int, list[int]] = {}
        self._quiescing: dict[Hashable, list[int]] = {}
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._preempted = self._evicted = 0

    def add(self, job: Job, *, transfer: int | None = None, first_block: int = 0, prefill_only: bool = False) -> None:
        """Queue an attempt; one that is here already stays as it is. With a transfer its blocks from `first_block` on
        are announced as they are computed, and `ship_quiet` must follow. Refusals come as a Failed event."""
        if self.scheduler.known(key_of(job)):
            return
        error = self._refusal(job)
        if error is not None:
            self.events.append(Failed(key_of(job), job.router_id, error))
            return
        request = self._request(job)
        request.transfer, request.first_block, request.prefill_only = transfer, first_block, prefill_only
        self.scheduler.enqueue(request)

    def reserve(self, owner: Hashable, job: Job) -> None:
        """Queue a reservation for an attempt prefilled elsewhere; a Reserved or ReservationFailed event answers. The
        blocks stay held until `start` or `grant_quiet`."""
        error = self._refusal(job)
        if error is None and self.scheduler.known(key_of(job)):
            error = GrantRefused(f"attempt {job.attempt} of {job.request_id} is here already")
        if error is not None:
            self.events.append(ReservationFailed(owner, error))
            return
        self.scheduler.enqueue(Reservation(owner, self._request(job)))

    def start(self, owner: Hashable, first: TokenDelta) -> None:
        """The reservation's blocks have landed: continue after the first token. If it was withdrawn meanwhile, nothing
        else will report it quiet: its blocks are released."""
        reservation = self.scheduler.reserved.get(owner)
        if reservation is None:
            self.grant_quiet(owner)
            return
        request = self.scheduler.start(reservation)
        request.computed_len = len(request.token_ids)
        request.admitted = time.monotonic()
        request.token_ids.extend(first.token_ids)
        self._register(request)
        self._report_blocks()

    def withdraw(self, owner: Hashable, error: KvferryError) -> None:
        """The grant failed: queued, it is dropped; with blocks, they stay held until `grant_quiet`."""
        reservation = self.scheduler.withdraw(owner)
        if reservation is None:
            return
        granted = bool(reservation.request.block_ids)
        if granted:
            self._quiescing[owner] = reservation.request.block_ids
            self.pool.holds.move(owner, GRANT, QUIESCE)
        self.events.append(ReservationFailed(owner, error, granted))

    def grant_quiet(self, owner: Hashable) -> None:
        """No receive of the withdrawn grant touches its blocks any more."""
        self.pool.release(owner, QUIESCE, self._quiescing.pop(owner, []))

    def ship_quiet(self, transfer: int) -> None:
        """No send of the ship touches its blocks any more."""
        self.pool.release(("ship", transfer), SHIP, self._ships.pop(transfer, []))

    def cancel(self, request_id: str, attempt: int) -> None:
        """Drop all attempts of the request up to `attempt`, and refuse those that arrive later."""
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, -1))
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        error = Cancelled("the request was cancelled")
        for entry in self.scheduler.attempts(request_id, attempt):
            if isinstance(entry, Reservation):
                self.withdraw(entry.owner, error)
            else:
                self.scheduler.remove(entry)
                self.events.append(Failed(entry.key, entry.job.router_id, error))

    def cancel_router(self, router_id: str) -> None:
        """The router is gone: drop everything it asked for."""
        entries = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.reserved.values()]
        for entry in entries:
            if entry.job.router_id == router_id:
                self.cancel(entry.job.request_id, entry.job.attempt)

    def has_work(self) -> bool:
        """Whether a step could do something."""
        return self.scheduler.has_work()

    def step(self) -> bool:
        """Schedule, run, commit. False when nothing could run (all that waits lacks blocks)."""
        began = time.monotonic()
        slices = self.scheduler.schedule()
        self._announce_admissions()
        if slices:
            drawn = self.runner.run(slices)
            for part, sampled in zip(slices, drawn, strict=True):
                self._commit(part, sampled)
            self._report_step(slices, time.monotonic() - began)
        self._report_blocks()
        return bool(slices)

    def fail_all(self, error: KvferryError) -> None:
        """The step broke: every running request ends with the error; what is queued stays."""
        for request in list(self.scheduler.running):
            self.scheduler.remove(request)
            self.events.append(Failed(request.key, request.job.router_id, error))

    def load(self) -> Load:
        """What the node is doing now."""
        granted = sum(len(r.request.block_ids) - r.first_block for r in self.scheduler.reserved.values())
        free, cached = self.pool.free_blocks, self.pool.cached_blocks
        return Load(
            waiting_requests=len(self.scheduler.waiting),
            waiting_tokens=self.scheduler.waiting_tokens,
            running_requests=len(self.scheduler.running),
            free_blocks=free,
            active_blocks=self.pool.num_blocks - free - cached - granted,
            cached_blocks=cached,
            granted_blocks=granted,
            total_blocks=self.pool.num_blocks,
            open_grants=len(self.scheduler.reserved),
        )

    def check_integrity(self) -> None:
        """Assert that the books balance; with nothing under way, that no block is held."""
        self.pool.check_integrity()
        if not (self.has_work() or self.scheduler.reserved or self._ships or self._quiescing):
            assert self.pool.available == self.pool.num_blocks, "blocks leaked"

    def _request(self, job: Job) -> Request:
        root = root_hash(self.config.fingerprint, job.namespace)
        return Request(job, root, self.config.block_size)

    def _refusal(self, job: Job) -> KvferryError | None:
        if self._cancelled.get(job.request_id, -1) >= job.attempt:
            return Cancelled("the request was cancelled before it arrived")
        if not 0 < len(job.token_ids) < self.longest:
            return ContextLengthExceeded(
                f"the prompt has {len(job.token_ids)} tokens; this node takes 1 to {self.longest - 1}", param="prompt"
            )
        return self._out_of_range(job)

    def _out_of_range(self, job: Job) -> KvferryError | None:
        """Ids that the model does not have would break the step for everybody in it."""
        vocab_size = self.runner.model.info.vocab_size
        if min(job.token_ids) < 0 or max(job.token_ids) >= vocab_size:
            return InvalidRequest(f"token ids must be at least 0 and below {vocab_size}", param="prompt")
        try:
            job.params.validate(vocab_size)
        except InvalidRequest as error:
            return error
        return None

    def _announce_admissions(self) -> None:
        for request in self.scheduler.newly_admitted:
            assert request.admitted is not None
            if request.transfer is not None:
                self._ships[request.transfer] = request.block_ids
                self._ship(request, request.registered)
            queried = len(request.token_ids)
            self.events.append(
                Admitted(request.key, request.admitted - request.arrived, queried, request.cached_len or 0)
            )
        for reservation in self.scheduler.newly_reserved:
            blocks = tuple(reservation.request.block_ids[reservation.first_block :])
            self.events.append(Reserved(reservation.owner, reservation.first_block, blocks))
            request = reservation.request
            self.events.append(
                Admitted(request.key, time.monotonic() - request.arrived, len(request.token_ids), request.computed_len)
            )
        self.scheduler.newly_admitted.clear()
        self.scheduler.newly_reserved.clear()

    def _commit(self, part: Slice, sampled: Sampled | None) -> None:
        request = part.request
        request.computed_len += part.count
        self._register(request)
        if request.transfer is not None:
            complete = request.uncomputed == 0
            self._ship(request, len(request.block_ids) if complete else request.registered)
        if sampled is not None:
            self._emit(request, sampled)

    def _register(self, request: Request) -> None:
        """Make the request's newly full blocks findable."""
        if request.computed_len // self.config.block_size == request.registered:
            return
        request.extend_hashes()
        holders: list[tuple[Hashable, str]] = [(request.key, REQUEST)]
        if request.transfer is not None:
            holders.append((("ship", request.transfer), SHIP))
        for i in range(request.registered, request.computed_len // self.config.block_size):
            parent = request.block_ids[i - 1] if i else None
            request.block_ids[i] = self.pool.register(holders, request.block_ids[i], request.hashes[i], parent)
            request.registered = i + 1

    def _ship(self, request: Request, upto: int) -> None:
        """Announce the computed blocks before index `upto` that decode lacks and that were not announced yet."""
        assert request.transfer is not None
        begin = max(request.shipped, request.first_block)
        if upto > begin:
            blocks = tuple((i, request.block_ids[i]) for i in range(begin, upto))
            self.events.append(Computed(request.transfer, blocks))
            request.shipped = upto

    def _emit(self, request: Request, sampled: Sampled) -> None:
        params = request.job.params
        index = request.output_len
        request.token_ids.append(sampled.token_id)
        ended = sampled.token_id in params.ending_token_ids
        full = request.output_len >= params.max_tokens or len(request.token_ids) >= self.longest
        delta = TokenDelta(
            request.job.request_id,
            request.job.attempt,
            index,
            (sampled.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason="stop" if ended else "length" if full else None,
            stop_token=sampled.token_id if ended else None,
        )
        handover = request.transfer if delta.finish_reason is None else None
        event = Generated(request.key, request.job.router_id, delta, handover=handover)
        if len(request.token_ids) == len(request.job.token_ids) + 1:
            event = self._first(request, event)
        self.events.append(event)
        if delta.finish_reason is not None or request.prefill_only:
            self.scheduler.remove(request)

    def _first(self, request: Request, event: Generated) -> Generated:
        """The first output on this node carries the prompt's accounting, its log-probabilities and the times."""
        prompt_len, cached = len(request.job.token_ids), request.cached_len or 0
        source = "reused_prefill" if request.prefill_only else "reused_decode"
        reuse = Reuse(prompt_len, computed=prompt_len - cached, **{source: cached})
        scored: Sequence[TokenLogprobs | None] | None = request.prompt_logprobs or None
        delta = replace(event.delta, reuse=reuse, prompt_logprobs=None if scored is None else tuple(scored))
        admitted = request.admitted or request.arrived
        return replace(event, delta=delta, queue_s=admitted - request.arrived, compute_s=time.monotonic() - admitted)

    def _report_step(self, slices: Sequence[Slice], seconds: float) -> None:
        decodes = sum(s.count == 1 and s.start >= len(s.request.job.token_ids) for s in slices)
        preempted, evicted = self.scheduler.preempted_total, self.pool.evicted_total
        self.events.append(
            Stepped(
                seconds,
                prefill_tokens=sum(s.count for s in slices) - decodes,
                decode_tokens=decodes,
                sequences=len(slices),
                preempted=preempted - self._preempted,
                evicted=evicted - self._evicted,
            )
        )
        self._preempted, self._evicted = preempted, evicted

    def _report_blocks(self) -> None:
        stored, removed = self.pool.drain_changes()
        if stored or removed:
            self.events.append(BlocksChanged(tuple(stored), tuple(removed)))
