"""Stepper runs one engine step: schedules and runs a batch, commits its tokens, updates requests, blocks and events."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress

from kvferry.engine import fault_isolation, output
from kvferry.engine.block_interfaces import REQUEST, SHIP
from kvferry.engine.cancellations import Cancellations, Deadlines
from kvferry.engine.draft_acceptance import Accepted
from kvferry.engine.events import BlocksChanged, Event, Failed, ReservationFailed
from kvferry.engine.fault_isolation import DeviceLost, Drawn, StepFault
from kvferry.engine.grammar_mask import GrammarMask
from kvferry.engine.lookahead import Lookahead
from kvferry.engine.pooling import Read
from kvferry.engine.prefix_registration import make_findable
from kvferry.engine.request import Request
from kvferry.engine.request_states import State
from kvferry.engine.runner import StepRunner
from kvferry.engine.sampler import Sampled
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.speculation import Speculation
from kvferry.engine.step_slices import Slice
from kvferry.engine.step_stats import StepStats
from kvferry.engine.suspended_steps import SuspendedStep
from kvferry.engine.transfer_events import admitted, state_to_ship, to_ship
from kvferry.engine.transfer_holds import TransferHolds
from kvferry.kernels.sampling import NO_TOKEN
from kvferry.protocol.errors import DeadlineExceeded, KvferryError, ModelFailed, NodeLost, StepFailed, reason

log = logging.getLogger("kvferry.engine")
REGISTERED_AT_ONCE = 1024
"""Blocks registered per step: they take some milliseconds. More than any prompt's chunk has."""


class Stepper:
    """Executes steps. longest: tokens at which a sequence ends; events: queue of outgoing events; tokens: number of
    tokens of the step that runs, for other threads."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        transfer_holds: TransferHolds,
        cancellations: Cancellations,
        longest: int,
        events: list[Event],
        speculation: Speculation,
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._runner = runner
        self._speculation = speculation
        self._transfer_holds = transfer_holds
        self._longest, self._events, self.tokens = longest, events, 0
        self.suspended = SuspendedStep(scheduler, cancellations)
        self.ahead = Lookahead(scheduler, runner, self.suspended, speculation, longest)
        self._deadlines = Deadlines()
        self._figures = StepStats(scheduler, speculation)

    def step(self) -> bool:
        """Schedule, run and commit one step; return False if all waiting requests lack blocks.

        A request that cannot be computed ends alone. If scheduling fails, every running request ends with the error and
        the queue stays, except its head where nothing ran. Raises DeviceLost."""
        late = self._deadlines.late(self._scheduler.request_table)
        if late:
            self.collect()
        for request in late:
            if self._scheduler.request_table.find(request.key) is request:
                self.drop(request, DeadlineExceeded(f"not finished after {request.job.deadline_s:.3g} s"))
        return self._tried(further=True)

    def collect(self) -> None:
        """End the step in flight, so that requests and blocks are as between two steps and nothing computes.

        Raises DeviceLost."""
        self.ahead.settle()
        if self.ahead:
            self._tried(further=False)

    def admit_grants(self) -> None:
        """Assign blocks to reservations as a step would, as far as they last.

        A failure here fails the next step, which reports it."""
        with suppress(Exception):
            self._scheduler.admit_grants()
        self._announce_admissions()

    def drop(self, request: Request, error: KvferryError) -> None:
        """End a request with an error in any state, and report that as an event.

        The blocks of a grant stay held until `TransferHolds.grant_quiet`."""
        granted = request.held_for_transfer
        self._scheduler.remove(request)
        if request.grant is None:
            self._events.append(Failed(request.key, request.job.router_id, error))
            return
        if granted:
            self._transfer_holds.withdraw(request)
        self._events.append(ReservationFailed(request.grant, error, granted))

    def register(self, request: Request, whole: bool = False) -> None:
        """Make the request's newly full blocks findable, REGISTERED_AT_ONCE at a time unless `whole`.

        Running streams wait while blocks are registered."""
        full = request.computed_len // request.block_size
        if full == request.registered:
            return
        until = full if whole else min(full, request.registered + REGISTERED_AT_ONCE)
        request.extend_hashes()
        holders: list[tuple[Hashable, str]] = [(request.key, REQUEST)]
        if request.transfer is not None:
            holders.append((("ship", request.transfer), SHIP))
        make_findable(self._pool, request, until, holders)

    def report_blocks(self) -> None:
        """Report blocks that became findable or were evicted."""
        (stored, removed), kept = self._pool.changes.drain(), self._pool.changes.drain_kept()
        if stored or removed or kept:
            self._events.append(BlocksChanged(stored, removed, kept))

    def _tried(self, *, further: bool) -> bool:
        try:
            return self._step(further)
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("engine step failed")
            fault_isolation.require_device(self._runner.model.device, error)
            self._fail_step(error if isinstance(error, KvferryError) else NodeLost(f"engine step failed: {error}"))
            self.ahead.settle()
            return True

    def _step(self, further: bool) -> bool:
        """Run one step; further: the next one may be launched."""
        began = time.monotonic()
        batch = self.ahead.take() or self.suspended.next(self._speculation.extend)
        self._announce_admissions()
        self.tokens = sum(part.count for part in batch.slices)
        drawn = self.ahead.run(batch, further=further) if batch.slices else None
        batch.seconds += time.monotonic() - began
        self.tokens, slices = 0, batch.slices
        if drawn is not None:
            drafting_s = self._speculation.settle(slices, drawn, batch.seconds)
            rows = sum(part.count for part in slices)
            self._scheduler.budget.stepped(rows, batch.seconds - drafting_s - self._runner.waited_s)
            for part, found in zip(slices, drawn, strict=True):
                self._settle(part, found)
            self._runner.masks.advance(_trailing(slices))
            self._events.append(self._figures.step(slices, batch.seconds))
        self.ahead.settle()
        self.report_blocks()
        return bool(slices)

    def _fail_step(self, error: KvferryError) -> None:
        """End the running requests, or the queue's head where nothing ran: the next step would fail on it again."""
        request_table = self._scheduler.request_table
        for request in list(request_table.running) or list(request_table.waiting)[:1]:
            self.drop(request, error)

    def _announce_admissions(self) -> None:
        for request in self._scheduler.newly_admitted:
            if request.transfer is not None:
                self._transfer_holds.ship(request)
                self._events += to_ship(request, request.registered)
            self._events += admitted(request)
        self._scheduler.newly_admitted.clear()

    def _settle(self, part: Slice, found: Drawn) -> None:
        """Commit one slice; a failure ends its request only."""
        request = part.request
        try:
            if isinstance(found, StepFault):
                self.drop(request, found.error)
            elif isinstance(found, Accepted):
                self._commit_all(request, found.tokens)
            else:
                self._commit(part, found)
        except Exception as error:
            log.exception("results for %s are unusable", request.key)
            if self._scheduler.request_table.find(request.key) is request:
                self.drop(request, StepFailed(f"the node's results for this request are unusable: {reason(error)}"))

    def _commit(self, part: Slice, sampled: Sampled | Read | None) -> None:
        request = part.request
        held_up = sampled is None and part.samples
        # Without a mask, the last token is computed again in order to draw the next one.
        request.computed_len += part.count - held_up
        if request.media is not None:
            request.media.computed(request.computed_len)
        self.register(request)
        if (states := self._scheduler.blocks.states) is not None:
            states.advance(request, part.count - held_up)
        if request.transfer is not None:
            self._ship(request)
        if sampled is None:
            mask = request.sample_row.mask if request.sample_row is not None else None
            if held_up and mask is not None and mask.error is not None:
                self.drop(request, mask.error)
            return
        if isinstance(sampled, Read):
            self._commit_read(request, sampled)
            return
        if request.output_here == 0:
            self._pool.tails.note(request)
        if sampled.token_id == NO_TOKEN:
            self.drop(request, output.nothing_drawn(request))
            return
        event = output.append(request, sampled, self._longest)
        self._events.append(event)
        if event.delta.finish_reason is not None or request.prefill_only:
            self.register(request, whole=True)
            self._scheduler.remove(request)

    def _ship(self, request: Request) -> None:
        """Announce blocks to send: full ones, and with the prompt's end all, and those of its recurrent state."""
        if request.uncomputed:
            self._events += to_ship(request, request.registered)
            return
        self._events += to_ship(request, len(request.block_ids))
        if (states := self._scheduler.blocks.states) is not None:
            sent = states.sent(request, request.state_blocks)
            new = [block_id for block_id in sent if block_id not in request.state_blocks]
            self._pool.holds.hold(("ship", request.transfer), SHIP, new)
            request.state_blocks = sent
            self._events += state_to_ship(request)

    def _commit_all(self, request: Request, tokens: Sequence[Sampled]) -> None:
        """Commit tokens as if each had its own step; this step computed the K/V of all but the last."""
        for sampled in tokens:
            if request.state is State.RUNNING:
                self._commit(Slice(request, request.computed_len, 1), sampled)

    def _commit_read(self, request: Request, found: Read) -> None:
        if not found.vector:
            self.drop(request, ModelFailed("the model's outputs for the prompt are NaN"))
            return
        self._events.append(output.read(request, found.vector))
        self._scheduler.remove(request)


def _trailing(slices: Sequence[Slice]) -> list[GrammarMask]:
    """Return grammar masks to advance: of requests that continue here after a token that was drawn now."""
    rows = (part.request.sample_row for part in slices if part.request.state is State.RUNNING)
    return [row.mask for row in rows if row is not None and row.mask is not None and row.mask.is_outdated]
