"""Engine: queues attempts, runs steps and collects events on the thread that calls it (engine/loop.py); no network."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from kvferry.engine.adapters import Adapters
from kvferry.engine.admission import Admission
from kvferry.engine.audit_schedule import audit
from kvferry.engine.auxiliary_blocks import make_auxiliary_blocks
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.canary import Canary
from kvferry.engine.cancellations import Cancellations
from kvferry.engine.command_errors import answering
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.events import Event, Failed, ReservationFailed
from kvferry.engine.grammars import Grammars
from kvferry.engine.load import current_load
from kvferry.engine.media.encoder import EmbeddingSource, MediaEncoder
from kvferry.engine.media.media_requests import MediaRequests
from kvferry.engine.migration import OutboundMigrations, widen
from kvferry.engine.prefault import Prefault
from kvferry.engine.replication import Replicas
from kvferry.engine.request import Key, Request, key_of
from kvferry.engine.request_states import Awaits
from kvferry.engine.request_table import RequestTable
from kvferry.engine.runner import StepRunner
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.shared_cores.newcomer_priority import NewcomerPriority
from kvferry.engine.speculation import Speculation
from kvferry.engine.step import Stepper
from kvferry.engine.transfer_holds import TransferHolds
from kvferry.protocol.errors import Cancelled, GrantRefused, KvferryError
from kvferry.protocol.hashing import root_hash
from kvferry.protocol.lease import Load
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.process_names import NOBODY, NodeName
from kvferry.protocol.work import Embed, Generate


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. fingerprint: root of the block hashes. max_model_len: limit of prompt and output tokens.

    takes: kinds of work that the model does. shares_cores: prompts of grants are computed on this engine's cores.
    drafts: limit of speculative tokens per stream and step. state_stride: see `StateCheckpoints`."""

    fingerprint: str
    block_size: int
    max_model_len: int
    limits: Limits
    takes: tuple[type, ...] = (Generate, Embed)
    shares_cores: bool = False
    drafts: int = 0
    state_stride: int = 0


class Engine:
    """Compute side of a node."""

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        pool: BlockPool,
        draft_model: DraftModel | None = None,
        encoder: MediaEncoder | None = None,
        embeddings: EmbeddingSource | None = None,
    ) -> None:
        self.config, self.runner, self.pool, self.draft_model = config, runner, pool, draft_model
        self.request_table = RequestTable()
        rows = config.limits.max_num_batched_tokens
        self.states = make_auxiliary_blocks(runner, pool, config.block_size, rows, config.state_stride)
        self.media = MediaRequests(encoder, embeddings, lambda key: self.resume(key, Awaits.MEDIA), self.fail)
        self.scheduler = Scheduler(
            pool, self.request_table, config.block_size, config.limits, runner.copy_block, self.states, self.media
        )
        self.prefixes = self.scheduler.blocks.prefixes
        self.events: list[Event] = []
        room = pool.num_blocks if self.states is None else self.states.longest
        self.longest = min(config.max_model_len, room * config.block_size)
        self.transfer_holds = holds = TransferHolds(pool)
        self.cancellations = cancelled = Cancellations()
        self.newcomer_priority = NewcomerPriority(self.request_table, shares=config.shares_cores)
        info = runner.model.info
        self.grammars = Grammars(runner.masks, lambda key: self.resume(key, Awaits.GRAMMAR), self.fail)
        self.canary: Canary | None = None
        self.prefault: Prefault | None = None
        self._admission = Admission(self.longest, info.vocab_size, config.takes, info.name, self.media.check)
        self.adapters = Adapters()
        self.moving = OutboundMigrations(pool, self.scheduler, self.longest, self.events)
        self.copies = Replicas(pool, self.request_table, self.states)
        speculation = Speculation(self.scheduler.blocks, config.drafts, rows, draft_model)
        self.request_table.left = speculation.forget
        self.stepper = Stepper(self.scheduler, runner, holds, cancelled, self.longest, self.events, speculation)

    def add(
        self,
        job: Job,
        *,
        transfer: int | None = None,
        first_block: int = 0,
        prefill_only: bool = False,
        awaits: Iterable[Awaits] = (),
    ) -> None:
        """Queue an attempt, unless it is here already. If that fails, a Failed event answers.

        With a transfer, its blocks from `first_block` on are announced as they are computed, until
        `transfer_holds.ship_quiet`. It starts once `resume` was called for everything in `awaits`."""
        if self.request_table.find(key_of(job)):
            return
        with answering(lambda error: self._refuse(job, error)):
            self._admission.check(job)
            request = self._request(job)
            request.transfer, request.first_block, request.prefill_only = transfer, first_block, prefill_only
            request.awaits.update(awaits)
            self._enter(request)

    def reserve(self, grant: Hashable, job: Job, awaits: Iterable[Awaits] = ()) -> None:
        """Queue an attempt whose prompt arrives by a grant. A Reserved or ReservationFailed event answers.

        Its blocks stay held until `start` or `transfer_holds.grant_quiet`."""
        with answering(lambda error: self._refuse_grant(grant, error)):
            self._admission.check(job)
            if self.request_table.find(key_of(job)):
                raise GrantRefused(f"attempt {job.attempt} of {job.request_id} is already running")
            request = self._request(job)
            request.grant = grant
            request.awaits.update((Awaits.KV, *awaits))
            self._enter(request)

    def start(self, grant: Hashable, first: TokenDelta, covered: int = 0, sender: NodeName = NOBODY) -> None:
        """Continue after the first token: the grant's blocks have arrived from `sender`.

        If the grant was withdrawn meanwhile, its blocks are released. A Failed event answers if the request cannot
        continue. `covered`: leading tokens whose K/V is in the blocks (0: the job's)."""
        request = self.request_table.by_grant(grant)
        if request is None or not request.block_ids:
            self.transfer_holds.grant_quiet(grant)
            return
        shared = any(other.behind is request for other in self.request_table.awaiting.values())
        self.scheduler.land(request)
        request.computed_len = len(request.token_ids)
        self.pool.tails.note(request)
        with answering(lambda error: self._refuse(request.job, error)):
            room = len(request.block_ids) * self.config.block_size
            self._admission.check_first(request.job, first.token_ids, covered, room)
            request.token_ids.extend(first.token_ids)
            request.computed_len = covered or request.computed_len
            checked = self.canary is not None and self.canary.landed(request, sender)
            if self.states is not None:
                self.states.arrived(request)
            self.stepper.register(request, whole=shared or checked)
            if self.canary is not None:
                self.canary.hold_chain(request)
            widen(self.scheduler, request)
            if request.sample_row is not None and request.sample_row.mask is not None:
                self.grammars.follow(request)
        self.stepper.report_blocks()

    def resume(self, key: Key, awaited: Awaits) -> None:
        """Resume an attempt whose awaited condition is met; ignored if it has gone."""
        request = self.request_table.find(key)
        if request is not None:
            self.request_table.resume(request, awaited)

    def fail(self, key: Key, error: KvferryError) -> None:
        """End an attempt whose awaited condition failed; ignored if it has gone."""
        request = self.request_table.find(key)
        if request is not None:
            self.stepper.drop(request, error)

    def withdraw(self, grant: Hashable, error: KvferryError) -> None:
        """Fail the grant: a queued request is dropped; blocks it has stay held until `transfer_holds.grant_quiet`."""
        request = self.request_table.by_grant(grant)
        if request is not None:
            self.stepper.drop(request, error)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Drop all attempts of the request up to `attempt`, and refuse those that arrive later."""
        self._admission.close(request_id, attempt)
        error = Cancelled("the request was cancelled")
        for request in self.request_table.attempts(request_id, attempt):
            self.stepper.drop(request, error)

    def cancel_router(self, router_id: str) -> None:
        """Drop all attempts of a lost router."""
        for request in list(self.request_table):
            if request.job.router_id == router_id:
                self.cancel(request.job.request_id, request.job.attempt)

    def has_work(self) -> bool:
        """Return whether a step could do something."""
        return bool(self.request_table.running or self.request_table.waiting)

    def step(self) -> bool:
        """Schedule, run and commit a step; return False if nothing could run because all waiting requests lack blocks.

        A request that cannot be computed ends alone; if scheduling fails, all running requests end. The step commits
        nothing once all its attempts are in `cancellations`. Raises DeviceLost: no step can run."""
        began = time.monotonic()
        ran = self.stepper.step()
        self.newcomer_priority.stepped(time.monotonic() - began)
        self.adapters.settle(self.request_table)
        return ran

    def load(self) -> Load:
        """Return the node's current load."""
        return current_load(self.request_table, self.pool)

    def check_integrity(self) -> None:
        """Assert that all counts agree and that an idle engine holds no block."""
        for _ in audit(self):
            pass

    def _refuse(self, job: Job, error: KvferryError) -> None:
        """End an attempt, which may be here, or an older one of the same name in its place."""
        request = self.request_table.find(key_of(job))
        if request is not None and request.job is job:
            self.stepper.drop(request, error)
        else:
            self.events.append(Failed(key_of(job), job.router_id, error))

    def _refuse_grant(self, grant: Hashable, error: KvferryError) -> None:
        """End a request, which may be queued already."""
        request = self.request_table.by_grant(grant)
        if request is not None:
            self.stepper.drop(request, error)
        else:
            self.events.append(ReservationFailed(grant, error))

    def _enter(self, request: Request) -> None:
        """Queue the request; one with a grammar waits for that, too."""
        self.media.enter(request)
        if request.job.grammar is not None:
            request.awaits.add(Awaits.GRAMMAR)
        self.scheduler.enqueue(request)
        if request.job.grammar is not None:
            self.grammars.open(request)

    def _request(self, job: Job) -> Request:
        root = root_hash(self.config.fingerprint, job.namespace, job.adapter)
        return Request(job, root, self.config.block_size, adapter=self.adapters.find(job.adapter))
