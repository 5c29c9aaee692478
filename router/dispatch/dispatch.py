"""RequestDispatch: runs one request: places it, starts attempts, and retries elsewhere until its last token.

After a failure, a new attempt continues after the tokens already delivered. Tokens of older attempts are ignored."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from functools import partial

from kvferry.placement.types import Placement
from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.attempt_planner import AttemptPlanner
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.dispatch.events import Event, NodeDrains, NodeSuspected
from kvferry.router.dispatch.failures import Failure
from kvferry.router.dispatch.hedged_attempts import HedgedAttempts
from kvferry.router.dispatch.hedging import HedgePolicy
from kvferry.router.dispatch.interface import Fork, Output, OutputComplete, RequestSpec, Route
from kvferry.router.dispatch.migration import Migration
from kvferry.router.dispatch.prediction import ReuseAccount
from kvferry.router.dispatch.timers import EventQueue, Timer, Timers
from kvferry.router.dispatch.token_order import OrderedTokens
from kvferry.router.dispatch.token_sink import TokenSink
from kvferry.router.nodes.node_entry import node_key
from kvferry.router.request_log import RequestRecord

log = logging.getLogger(__name__)


class RequestDispatch:
    """Dispatch of one request. Implements `router.dispatch.interface.Dispatch`.

    It reserves, sends and times nothing before the first iteration, and leaves nothing running after it. Tokens that
    its request begins with (`RequestSpec.delivered`) are not among its outputs."""

    def __init__(self, spec: RequestSpec, context: DispatchContext) -> None:
        self.route: Route | None = spec.delivered.route if spec.delivered else None
        self._spec, self._context = spec, context
        self._wire_id = f"{spec.request_id}-{secrets.token_hex(6)}"
        self._inbox: EventQueue[Event | Timer | Exception | None] = EventQueue()
        self._sequence = OrderedTokens(list(spec.delivered.token_ids) if spec.delivered else [])
        self._hedged, self._prediction = HedgedAttempts(), ReuseAccount(context)
        self._sink = TokenSink(self._inbox, self._sequence, self._hedged, self._output)
        self.listen = self._sink.listen
        self._planner = AttemptPlanner(spec, context, self._sequence.tokens, self._preempt, self._inbox.post)
        self.calls_tools = partial(context.session_notes.calls_tools, self._planner.holders, self._wire_id)
        self._hedge_policy = HedgePolicy(self._hedged, self._planner, context, self._inbox.post)
        self._migration = Migration(self._hedged, self._planner, context, self._sink.receive)
        self._timers: Timers | None = None
        self._record: RequestRecord | None = None
        self._attempts, self._outcome, self._over = 0, "", False

    @property
    def fork(self) -> Fork | None:
        """Return the fork data: the node that decodes the request, or the prefill node if it ended there."""
        if self.route is None:
            return None
        if (leader := self._hedged.leader) is None:
            return Fork(self._wire_id, None, self._planner.fingerprint)
        node = leader.placement.decode if self.route.decode else leader.placement.prefill
        return Fork(leader.job.request_id, node_key(node) if node else None, self._planner.fingerprint)

    async def cancel(self, *, complete: bool = False) -> None:
        if not self._over:
            self._outcome = "done" if complete else ""
            self._end(cancel=True)
            self._inbox.post(Cancelled("the request was cancelled"))

    async def __aiter__(self) -> AsyncGenerator[Output]:
        if self._over:
            raise Cancelled("the request was cancelled")
        try:
            self._timers, model = Timers(self._spec.call.deadline, self._on_timer), self._context.model.name.first
            self._record = self._context.request_log.begin(self._spec, model, self._sequence.tokens)
            while not self._sequence.finished:
                if not self._hedged.runners:
                    await self._launch()
                event = await self._next()
                if isinstance(event, TokenDelta):
                    if event.reuse is not None:
                        self._take_account(event)
                    if len(self._hedged.runners) > 1:
                        self._hedge_policy.decide(event, len(self._sequence.tokens))
                    for delta in self._sequence.push(event):
                        yield self._output(delta)
                    if event.reuse is not None and (leader := self._hedged.leader) and leader.ships and not self._over:
                        self._timers.expect(self._hedge_policy.next_late_s())
                elif isinstance(event, Failure):
                    self._fail(event)
                elif isinstance(event, NodeDrains):
                    await self._hand_over(event.attempt)
                elif event is Timer.LATE or isinstance(event, NodeSuspected):
                    await self._hedge(late=event is Timer.LATE)
        except OutputComplete:
            self._outcome = "done"
        except KvferryError as error:
            self._outcome = error.code
            raise
        finally:
            if not self._over:
                self._end(cancel=not self._sequence.finished)
            self._timers = None
            self._sink.end()

    async def _next(self) -> Event | Timer | None:
        """Return the next event of a running attempt, or None for an event without effect.

        Raises the error that ends the request: its deadline, its cancellation, or a listener's exception."""
        event = await self._inbox.next()
        if self._over:
            raise Cancelled("the request was cancelled")
        if isinstance(event, TokenDelta) or isinstance(event, Failure | NodeDrains | NodeSuspected):  # noqa: SIM101 - for every token
            number = event.attempt
            return event if number in self._hedged.runners or self._migration.is_successor(number) else None
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                del event  # The traceback refers to this frame; break the cycle.
        return event

    async def _launch(self) -> None:
        """Place and start the next attempt, without an await between placement and reservation."""
        assert self._timers
        reuse = await self._planner.reuse()
        while (placement := self._planner.place(reuse, self._timers.left_s)) is None:
            self._timers.pause(self._planner.backoff.pause_s(), self._inbox.post)
            await self._next()
        if self._over:
            raise Cancelled("the request was cancelled")
        self._sequence.restart()
        self._begin(self._wire_id, placement)

    async def _hedge(self, *, late: bool) -> None:
        """Start a second attempt on other nodes if the first is late, waits for room, or its node may hang.

        The first token decides between them. Each has its own request id, so that it can be cancelled alone."""

        def is_due() -> bool:
            is_stale = late and not (self._timers and self._timers.late and not self._inbox)
            return not (self._over or self._migration.target or is_stale)

        if (hedge := await self._hedge_policy.plan(is_due, late=late)) is not None:
            self._retried(hedge.kind, hedge.nodes, hedge.reason)
            self._begin(f"{self._wire_id}-h{self._attempts}", hedge.placement)
        elif late and self._timers and self._hedge_policy.waits_for_blocks:
            self._timers.repeat_late()

    def _begin(self, name: str, placement: Placement) -> None:
        assert self._timers and self._record  # noqa: PT018
        job = self._job(name, placement)
        self._prediction.began(job.attempt, placement)
        hashes = self._planner.hashes(placement.prefill or placement.decode)
        self._hedged.enter(self._context.launch(job, placement, self._sink.receive, hashes=hashes))
        self._attempts += 1
        if not self.route or self._attempts == 1:
            self._record.sent(placement)
        self._timers.expect(self._hedge_policy.next_late_s())
        self._planner.runs_on(self._hedged.nodes)

    def _job(self, name: str, placement: Placement) -> Job:
        """Build the job of the next attempt."""
        assert self._timers
        state = tuple(self._sequence.tokens), self._context.router_id, self._timers.left_s
        return jobs.job(self._spec, name, self._attempts, *state, placement, self._planner.failures)

    async def _hand_over(self, number: int) -> None:
        """Start a migration: the node of attempt `number` drains."""
        leaves = self._hedged.leader.placement.decode if self._hedged.leader else None
        if await self._migration.begin(number, self._job):
            self._attempts += 1
            self._retried("move", (leaves, self._migration.target), "its node drains")

    def _fail(self, failure: Failure) -> None:
        """Give up a failed attempt and apply the retry policy; a hedged attempt may still run."""
        if self._migration.handles(failure):
            if self._record and self._hedged.leader:
                self._record.sent(self._hedged.leader.placement, migrates=True)
            return
        self._hedged.leave(failure.attempt)
        if self._timers and self._hedged.runners:
            self._timers.expect(self._hedge_policy.next_late_s())
        self._prediction.ended(failure.attempt, failure.error)
        step = self._planner.failed(failure, self._hedged.nodes)
        self._retried(step, failure.at_fault, f"{failure.error.code}: {failure.error}")
        log.info("%s: %s (%s), next: %s", self._wire_id, failure.error.code, failure.error, step)

    def _preempt(self) -> None:
        """Free the nodes for a request with targets; this one continues later, after its delivered tokens."""
        self._migration.end()
        self._retried("displaced", self._hedged.clear(), "a request with targets takes its place")
        self._planner.runs_on(self._hedged.nodes)

    def _retried(self, step: str, nodes: Iterable[NodeLease | None], detail: str) -> None:
        self._context.metrics.retried(step)
        self._context.request_log.retried(self._record, step, [node.node_id for node in nodes if node], detail)

    def _output(self, delta: TokenDelta) -> Output:
        assert self._timers
        self._timers.progressed()
        self._planner.record_progress()
        if self.route is None:
            self._take_route(delta)
        if delta.finish_reason is not None:
            self._end(cancel=False)
        return jobs.output(delta)

    def _take_route(self, delta: TokenDelta) -> None:
        attempt = self._hedged.runners.get(delta.attempt, self._hedged.leader)
        assert attempt and self._record  # noqa: PT018
        computed_by = (place := attempt.placement).prefill or place.decode
        assert computed_by
        decode = None if place.prefill and delta.finish_reason is not None else place.decode
        self._planner.computed(computed_by, decode if place.prefill else None)
        reuse, late = self._prediction.first(delta, attempt, computed_by)
        prefill_id = place.prefill.node_id if place.prefill else None
        self.route = Route(prefill_id, decode.node_id if decode else None, reuse, late)
        self._context.request_log.first(self._record, self.route)

    def _take_account(self, delta: TokenDelta) -> None:
        """Take a report of token sources that comes after the first token: a late one, or that of a later attempt."""
        attempt = self._hedged.runners.get(delta.attempt)
        if attempt and self.route and self._record and (reuse := self._prediction.later(delta, attempt, self.route)):
            self.route = replace(self.route, reuse=reuse, late=False)
            self._record.cached = reuse.cached_len

    def _on_timer(self, timer: Timer) -> None:
        if timer is Timer.DEADLINE:
            self._inbox.post(self._planner.expired())
        elif timer is Timer.STALL:
            self._hedge_policy.stall(self._timers.stalled_s if self._timers else 0.0)
        else:
            self._inbox.post(timer)

    def _end(self, *, cancel: bool) -> None:
        self._over = True
        if self._timers:
            self._timers.stop()
        self._migration.end()
        self._hedged.close(cancel=cancel)
        self._planner.end()
        self._context.request_log.end(self._record, (self._outcome or "cancelled") if cancel else "done")
