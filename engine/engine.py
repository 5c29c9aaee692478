"""One model on one device: takes attempts and reservations, runs steps, says what happened. No threads, no network.

Everything here is called on the engine thread. Each call and each step leaves its news in `events` for the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.door import Door
from engine.events import Event, Failed, ReservationFailed
from engine.leaving import Leaving
from engine.lent import Lent
from engine.request import Request, Reservation, key_of
from engine.runner import Runner
from engine.scheduler import Limits, Scheduler
from engine.step import Stepper
from protocol.errors import Cancelled, GrantRefused, KvferryError, NodeLost
from protocol.hashing import root_hash
from protocol.lease import Load
from protocol.messages import Job, TokenDelta

log = logging.getLogger("kvferry.engine")


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
        self.lent = Lent(pool)
        self.leaving = Leaving()
        self._door = Door(self.longest, runner.model.info.vocab_size)
        self._stepper = Stepper(self.scheduler, runner, self.lent, self.leaving, self.longest, self.events)

    def add(self, job: Job, *, transfer: int | None = None, first_block: int = 0, prefill_only: bool = False) -> None:
        """Queue an attempt; one that is here already stays as it is. With a transfer its blocks from `first_block` on
        are announced as they are computed, and `ship_quiet` must follow. A Failed event answers if it cannot be."""
        if self.scheduler.known(key_of(job)):
            return
        with self._answering(lambda error: self._fail(job, error)):
            self._door.check(job)
            request = self._request(job)
            request.transfer, request.first_block, request.prefill_only = transfer, first_block, prefill_only
            self.scheduler.enqueue(request)

    def reserve(self, owner: Hashable, job: Job) -> None:
        """Queue a reservation for an attempt prefilled elsewhere; a Reserved or ReservationFailed event answers. The
        blocks stay held until `start` or `grant_quiet`."""
        with self._answering(lambda error: self._refuse(owner, error)):
            self._door.check(job)
            if self.scheduler.known(key_of(job)):
                raise GrantRefused(f"attempt {job.attempt} of {job.request_id} is here already")
            self.scheduler.enqueue(Reservation(owner, self._request(job)))

    def start(self, owner: Hashable, first: TokenDelta) -> None:
        """The reservation's blocks have landed: continue after the first token. If it was withdrawn meanwhile, nothing
        else will report it quiet: its blocks are released. A Failed event answers if it cannot go on."""
        reservation = self.scheduler.reserved.get(owner)
        if reservation is None:
            self.grant_quiet(owner)
            return
        request = self.scheduler.start(reservation)
        request.computed_len = len(request.token_ids)
        request.admitted = time.monotonic()
        with self._answering(lambda error: self._fail(request.job, error)):
            self._door.check_first(first.token_ids)
            request.token_ids.extend(first.token_ids)
            self._stepper.register(request)
        self._stepper.report_blocks()

    def withdraw(self, owner: Hashable, error: KvferryError) -> None:
        """The grant failed: queued, it is dropped; with blocks, they stay held until `grant_quiet`."""
        reservation = self.scheduler.withdraw(owner)
        if reservation is None:
            return
        granted = bool(reservation.request.block_ids)
        if granted:
            self.lent.withdraw(owner, reservation.request.block_ids)
        self.events.append(ReservationFailed(owner, error, granted))

    def grant_quiet(self, owner: Hashable) -> None:
        """No receive of the withdrawn grant touches its blocks any more."""
        self.lent.grant_quiet(owner)

    def ship_quiet(self, transfer: int) -> None:
        """No send of the ship touches its blocks any more."""
        self.lent.ship_quiet(transfer)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Drop all attempts of the request up to `attempt`, and refuse those that arrive later."""
        self._door.close(request_id, attempt)
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
        """Schedule, run, commit. False when nothing could run (all that waits lacks blocks). If it breaks, every
        running request ends with the error; what is queued stays, but for its head where nothing ran. It ends early,
        with nothing committed, when all that it computes is for attempts that are `leaving`."""
        return self._stepper.step()

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
        for _ in audit(self):
            pass

    @contextmanager
    def _answering(self, answer: Callable[[KvferryError], None]) -> Iterator[None]:
        """Whatever is raised inside becomes an answer to those who wait for one."""
        try:
            yield
        except KvferryError as error:
            answer(error)
        except Exception as error:
            log.exception("engine command failed")
            answer(NodeLost(f"engine command failed: {error}"))

    def _fail(self, job: Job, error: KvferryError) -> None:
        """End an attempt that may be here already."""
        for entry in self.scheduler.attempts(job.request_id, job.attempt):
            if isinstance(entry, Request) and entry.job is job:
                self.scheduler.remove(entry)
        self.events.append(Failed(key_of(job), job.router_id, error))

    def _refuse(self, owner: Hashable, error: KvferryError) -> None:
        """End a reservation that may be queued already."""
        self.scheduler.withdraw(owner)
        self.events.append(ReservationFailed(owner, error))

    def _request(self, job: Job) -> Request:
        root = root_hash(self.config.fingerprint, job.namespace)
        return Request(job, root, self.config.block_size)


def audit(engine: Engine) -> Iterator[None]:
    """Assert that the books balance and that with nothing under way no block is held; in pieces of a fraction of a
    millisecond, between which the engine may work."""
    yield from engine.pool.audit()
    if not (engine.has_work() or engine.scheduler.reserved or engine.lent):
        assert engine.pool.available == engine.pool.num_blocks, "blocks leaked"
