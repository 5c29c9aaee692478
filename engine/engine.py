"""One model on one device: takes attempts, runs steps, says what happened. No threads, no network.

Everything here is called on the engine thread. Each call and each step leaves its news in `events` for the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine import roster
from engine.adapters import Adapters
from engine.block_pool import BlockPool
from engine.door import Door
from engine.events import Event, Failed, ReservationFailed
from engine.grammars import Grammars
from engine.leaving import Leaving
from engine.lent import Lent
from engine.request import Key, Request, key_of
from engine.roster import Roster
from engine.runner import Runs
from engine.scheduler import Limits, Scheduler
from engine.states import Awaits
from engine.step import Stepper
from protocol.errors import Cancelled, GrantRefused, KvferryError, NodeLost
from protocol.hashing import root_hash
from protocol.lease import Load
from protocol.messages import Job, TokenDelta
from protocol.work import Embed, Generate

log = logging.getLogger("kvferry.engine")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """fingerprint roots the block hashes; max_model_len bounds prompt plus output (tokens); takes: the kinds of work
    that the model does."""

    fingerprint: str
    block_size: int
    max_model_len: int
    limits: Limits
    takes: tuple[type, ...] = (Generate, Embed)


class Engine:
    """The arithmetic side of a node."""

    def __init__(self, config: EngineConfig, runner: Runs, pool: BlockPool) -> None:
        self.config = config
        self.runner = runner
        self.pool = pool
        self.roster = Roster()
        self.scheduler = Scheduler(pool, self.roster, config.block_size, config.limits, runner.copy_block)
        self.events: list[Event] = []
        self.longest = min(config.max_model_len, pool.num_blocks * config.block_size)
        self.lent = Lent(pool)
        self.leaving = Leaving()
        info = runner.model.info
        self.grammars = Grammars(self, runner.masks)
        self._door = Door(self.longest, info.vocab_size, config.takes, info.name)
        self.adapters = Adapters()
        self._stepper = Stepper(self.scheduler, runner, self.lent, self.leaving, self.longest, self.events)

    def add(
        self,
        job: Job,
        *,
        transfer: int | None = None,
        first_block: int = 0,
        prefill_only: bool = False,
        awaits: Iterable[Awaits] = (),
    ) -> None:
        """Queue an attempt; one that is here already stays as it is. With a transfer its blocks from `first_block` on
        are announced as they are computed, and `lent.ship_quiet` must follow; for all that it awaits, `resume`. A
        Failed event answers if it cannot be."""
        if self.roster.find(key_of(job)):
            return
        with self._answering(lambda error: self._refuse(job, error)):
            self._door.check(job)
            request = self._request(job)
            request.transfer, request.first_block, request.prefill_only = transfer, first_block, prefill_only
            request.awaits.update(awaits)
            self._enter(request)

    def reserve(self, grant: Hashable, job: Job, awaits: Iterable[Awaits] = ()) -> None:
        """Queue an attempt whose prompt is computed elsewhere and comes by a grant: a Reserved or ReservationFailed
        event answers. Its blocks stay held until `start` or `lent.grant_quiet`. What else it awaits may come before or
        after them."""
        with self._answering(lambda error: self._refuse_grant(grant, error)):
            self._door.check(job)
            if self.roster.find(key_of(job)):
                raise GrantRefused(f"attempt {job.attempt} of {job.request_id} is here already")
            request = self._request(job)
            request.grant = grant
            request.awaits.update((Awaits.KV, *awaits))
            self._enter(request)

    def start(self, grant: Hashable, first: TokenDelta) -> None:
        """The grant's blocks have landed: continue after the first token. If it was withdrawn meanwhile, nothing else
        will report it quiet: its blocks are released. A Failed event answers if it cannot go on."""
        request = self.roster.by_grant(grant)
        if request is None or not request.block_ids:
            self.lent.grant_quiet(grant)
            return
        self.scheduler.land(request)
        request.computed_len = len(request.token_ids)
        self._stepper.note_tail(request)
        with self._answering(lambda error: self._refuse(request.job, error)):
            self._door.check_first(first.token_ids)
            request.token_ids.extend(first.token_ids)
            self._stepper.register(request)
            if request.sample_row is not None and request.sample_row.mask is not None:
                self.grammars.follow(request)
        self._stepper.report_blocks()

    def resume(self, key: Key, awaited: Awaits) -> None:
        """What an attempt awaited has come; nothing if it has gone."""
        request = self.roster.find(key)
        if request is not None:
            self.roster.resume(request, awaited)

    def fail(self, key: Key, error: KvferryError) -> None:
        """End an attempt: what it awaits will not come. Nothing if it has gone."""
        request = self.roster.find(key)
        if request is not None:
            self._stepper.drop(request, error)

    def withdraw(self, grant: Hashable, error: KvferryError) -> None:
        """The grant failed: queued, its request is dropped; with blocks, they stay held until `lent.grant_quiet`."""
        request = self.roster.by_grant(grant)
        if request is not None:
            self._stepper.drop(request, error)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Drop all attempts of the request up to `attempt`, and refuse those that arrive later."""
        self._door.close(request_id, attempt)
        error = Cancelled("the request was cancelled")
        for request in self.roster.attempts(request_id, attempt):
            self._stepper.drop(request, error)

    def cancel_router(self, router_id: str) -> None:
        """The router is gone: drop everything it asked for."""
        for request in list(self.roster):
            if request.job.router_id == router_id:
                self.cancel(request.job.request_id, request.job.attempt)

    def has_work(self) -> bool:
        """Whether a step could do something."""
        return bool(self.roster.running or self.roster.waiting)

    def step(self) -> bool:
        """Schedule, run, commit. False when nothing could run (all that waits lacks blocks). If it breaks, every
        running request ends with the error; what is queued stays, but for its head where nothing ran. It ends early,
        with nothing committed, when all that it computes is for attempts that are `leaving`."""
        ran = self._stepper.step()
        self.adapters.settle(self.roster)
        return ran

    def load(self) -> Load:
        """What the node is doing now."""
        here, seated = self.roster, self.roster.seated
        granted = [len(r.block_ids) - r.first_block for r in seated if r.grant is not None]
        free, cached = self.pool.free_blocks, self.pool.cached_blocks
        return Load(
            waiting_requests=len(here.waiting) + len(here.awaiting) - len(seated),
            waiting_tokens=here.waiting_tokens,
            running_requests=len(here.running) + len(seated) - len(granted),
            free_blocks=free,
            active_blocks=self.pool.num_blocks - free - cached - sum(granted),
            cached_blocks=cached,
            granted_blocks=sum(granted),
            total_blocks=self.pool.num_blocks,
            open_grants=len(granted),
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

    def _refuse(self, job: Job, error: KvferryError) -> None:
        """End an attempt that may be here already, or an older one of the same name in its place."""
        request = self.roster.find(key_of(job))
        if request is not None and request.job is job:
            self._stepper.drop(request, error)
        else:
            self.events.append(Failed(key_of(job), job.router_id, error))

    def _refuse_grant(self, grant: Hashable, error: KvferryError) -> None:
        """End a request that may be queued already."""
        request = self.roster.by_grant(grant)
        if request is not None:
            self._stepper.drop(request, error)
        else:
            self.events.append(ReservationFailed(grant, error))

    def _enter(self, request: Request) -> None:
        """Queue it. One with a grammar awaits that, whatever else it awaits."""
        if request.job.grammar is not None:
            request.awaits.add(Awaits.GRAMMAR)
        self.scheduler.enqueue(request)
        if request.job.grammar is not None:
            self.grammars.open(request)

    def _request(self, job: Job) -> Request:
        adapter = self.adapters.find(job.adapter)
        root = root_hash(self.config.fingerprint, job.namespace, job.adapter)
        return Request(job, root, self.config.block_size, adapter=adapter)


def audit(engine: Engine) -> Iterator[None]:
    """Assert that the books balance and that with nothing under way no block is held; in pieces of a fraction of a
    millisecond, between which the engine may work."""
    yield from engine.pool.audit()
    roster.check_integrity(engine.roster)
    if not (engine.roster or engine.lent):
        assert engine.pool.available == engine.pool.num_blocks, "blocks leaked"
