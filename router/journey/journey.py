"""The journey of one request: placed, tried, and tried elsewhere until its last token is out.

Whatever fails on the way, the outputs are one sequence: a new attempt gets the prompt plus the tokens already handed
out and goes on from there, and tokens of older attempts are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

from placement.terms import Demand, Placement
from protocol.errors import Cancelled, DeadlineExceeded, GrantRefused, KvferryError, NoNodes, Overloaded
from protocol.hashing import chain, root_hash
from protocol.lease import NodeLease
from protocol.messages import Job, TokenDelta
from protocol.work import Generate, Work
from router.journey.attempt import Attempt, Event
from router.journey.ladder import Failure, Ladder
from router.journey.ports import Ground
from router.journey.sequence import Sequence
from router.journey.spec import Fork, Output, RequestSpec, Route
from router.nodes.entry import node_key

log = logging.getLogger(__name__)

SHARE = 0.5
"""Part of the remaining time an attempt may pass without a new token before the next one is tried."""
PAUSE_S = (0.1, 1.0)
"""Shortest and longest pause while no node can take the request."""


class RouterJourney:
    """Implements `router.journey.spec.Journey`. Nothing is booked, sent or timed before the first iteration and nothing
    is left after the iteration ends, however it ends: last token, error, `cancel`, closed iterator, cancelled task."""

    def __init__(self, spec: RequestSpec, ground: Ground) -> None:
        self.route: Route | None = None
        self._spec, self._ground = spec, ground
        self._wire_id = f"{spec.request_id}-{secrets.token_hex(6)}"
        self._mail: asyncio.Queue[Event | KvferryError | None] = asyncio.Queue()
        self._sequence = Sequence()
        self._ladder = Ladder()
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._first_placement: Placement | None = None
        self._failure: KvferryError | None = None
        self._stuck_at: float | None = None
        self._pause_s = PAUSE_S[0]
        self._deadline_at = self._progress_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._outputs()

    @property
    def fork(self) -> Fork | None:
        """Its prompt is where it decodes, or where it ended before that."""
        if self.route is None:
            return None
        place = self._attempt.placement if self._attempt else None
        node = place and (place.decode if self.route.decode else place.prefill)
        return Fork(self._wire_id, node_key(node) if node else None)

    async def cancel(self) -> None:
        if not self._over:
            self._end(cancel=True)
            self._mail.put_nowait(Cancelled("the request was cancelled"))

    def _demand(self) -> Demand:
        """What the next attempt needs."""
        fork = self._spec.fork_of
        return Demand(
            total_len=len(self._spec.token_ids) + len(self._sequence.tokens),
            prompt_only=self._spec.work.ends_on_prompt(len(self._sequence.tokens)),
            excluded=frozenset(self._ladder.excluded),
            pinned=self._ladder.pinned,
            local_only=self._ladder.local_only,
            beside=fork.node if fork and not self._sequence.tokens else None,
            adapter=self._spec.adapter,
        )

    async def _outputs(self) -> AsyncIterator[Output]:
        if self._over:
            raise Cancelled("the request was cancelled")
        try:
            self._begin()
            while not self._sequence.finished:
                if self._attempt is None:
                    await self._launch()
                event = await self._next()
                if isinstance(event, Failure):
                    self._fail(event)
                elif event is not None:
                    for delta in self._sequence.push(event):
                        yield self._output(delta)
        finally:
            self._end(cancel=not self._sequence.finished)

    async def _next(self) -> Event | None:
        """The next event of the present attempt. Raises what ends the request: its deadline, its cancellation."""
        event = await self._mail.get()
        if self._over:
            raise Cancelled("the request was cancelled")
        if isinstance(event, KvferryError):
            raise event
        current = self._attempt.job.attempt if self._attempt else -1
        return event if event is not None and event.attempt == current else None

    async def _launch(self) -> None:
        """Place and begin the next attempt. From the choice to the booking nothing is awaited."""
        token_ids = self._spec.token_ids + tuple(self._sequence.tokens)
        group = self._ground.group.members
        reuse = await self._ground.reuse(_hashes(self._spec, token_ids, group[0].lease) if group else ())
        while (placement := self._place(reuse)) is None:
            await self._pause()
        if self._over:
            raise Cancelled("the request was cancelled")
        self._first_placement = self._first_placement or placement
        self._progress_at = asyncio.get_running_loop().time()
        if self._attempts:
            self._sequence.restart()
        self._attempt = self._ground.launch(self._job(token_ids), placement, self._mail.put_nowait)
        self._attempts += 1
        self._watch()
        log.debug("%s attempt %d: %s", self._wire_id, self._attempts - 1, placement)

    def _place(self, reuse: dict[str, int]) -> Placement | None:
        """None: nothing can take it now, but it has begun and may wait."""
        try:
            return self._ground.place(self._demand(), reuse)
        except (NoNodes, Overloaded) as error:
            now = asyncio.get_running_loop().time()
            if self._failure is None or self._over:
                raise
            self._stuck_at = self._stuck_at or now
            if now - self._stuck_at > min(self._ground.patience_s, SHARE * (self._deadline_at - self._stuck_at)):
                raise self._hopeless(error) from self._failure
            self._ladder.forgive()
            return None

    def _hopeless(self, error: KvferryError) -> KvferryError:
        if isinstance(self._failure, GrantRefused | Overloaded):
            return Overloaded("every decode node is full", retry_after=error.retry_after or 1.0)
        return error

    async def _pause(self) -> None:
        asyncio.get_running_loop().call_later(self._pause_s, self._mail.put_nowait, None)
        self._pause_s = min(self._pause_s * 2, PAUSE_S[1])
        await self._next()

    def _fail(self, failure: Failure) -> None:
        """Give up the present attempt and climb the ladder."""
        assert self._attempt
        self._failure = failure.error
        self._attempt.close(cancel=True)
        self._attempt = None
        prefills = self._ground.able("prefill", node_key(failure.node), self._spec.adapter)
        rung = self._ladder.climb(failure, len(self._sequence.tokens), prefills)
        self._ground.metrics.ladder.labels(rung).inc()
        log.info("%s: %s (%s), next: %s", self._wire_id, failure.error.code, failure.error, rung)

    def _job(self, token_ids: tuple[int, ...]) -> Job:
        return Job(
            request_id=self._wire_id,
            attempt=self._attempts,
            token_ids=token_ids,
            prompt_len=len(self._spec.token_ids),
            work=_later(self._spec.work) if self._sequence.tokens else self._spec.work,
            router_id=self._ground.router_id,
            namespace=self._spec.namespace,
            trace=self._spec.call.trace,
            deadline_s=max(0.0, self._deadline_at - asyncio.get_running_loop().time()),
            fork_of=self._spec.fork_of.request_id if self._spec.fork_of else "",
            adapter=self._spec.adapter,
        )

    def _output(self, delta: TokenDelta) -> Output:
        loop = asyncio.get_running_loop()
        self._progress_at, self._stuck_at, self._pause_s = loop.time(), None, PAUSE_S[0]
        if self.route is None:
            self._take_route(delta)
        if delta.finish_reason is not None:
            self._end(cancel=False)
        return _output_of(delta)

    def _take_route(self, delta: TokenDelta) -> None:
        assert self._attempt
        assert self._first_placement
        place = self._attempt.placement
        reuse = self._ground.account(delta.reuse, self._attempt.job, place.prefill or place.decode)
        ended_on_prefill = place.prefill is not None and delta.finish_reason is not None
        prefill_id = place.prefill.node_id if place.prefill else None
        decode_id = place.decode.node_id if place.decode and not ended_on_prefill else None
        self.route = Route(prefill_id, decode_id, reuse)
        self._ground.record(self._first_placement, place, reuse, self._attempt.age_s)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._progress_at = loop.time()
        self._deadline_at = self._spec.call.deadline
        self._watch()

    def _watch(self) -> None:
        """Runs when the deadline or an attempt's share of it may be over; costs nothing per token."""
        loop = asyncio.get_running_loop()
        if self._timer:
            self._timer.cancel()
        now = loop.time()
        stalled_at = self._progress_at + SHARE * (self._deadline_at - self._progress_at)
        if now >= self._deadline_at:
            self._mail.put_nowait(
                DeadlineExceeded(f"not finished after {self._deadline_at - self._spec.call.arrival:.3g} s")
            )
            return
        if self._attempt and now >= stalled_at:
            self._progress_at = now
            self._attempt.stall()
            stalled_at = now + SHARE * (self._deadline_at - now)
        due = stalled_at if stalled_at > now else self._deadline_at
        self._timer = loop.call_at(min(due, self._deadline_at), self._watch)

    def _end(self, *, cancel: bool) -> None:
        self._over = True
        if self._timer:
            self._timer.cancel()
        if self._attempt:
            self._attempt.close(cancel=cancel)


def _later(work: Work) -> Work:
    """Of an attempt after the first output."""
    return replace(work, params=replace(work.params, prompt_logprobs=None)) if isinstance(work, Generate) else work


def _hashes(spec: RequestSpec, token_ids: tuple[int, ...], lease: NodeLease) -> list[bytes]:
    """Of the prompt and what was delivered; empty where nothing can be reused: some work needs the whole prompt
    computed."""
    if spec.work.whole_prompt and len(token_ids) == len(spec.token_ids):
        return []
    return chain(root_hash(lease.fingerprint, spec.namespace, spec.adapter), token_ids, lease.block_size)


def _output_of(delta: TokenDelta) -> Output:
    told = (delta.logprobs, delta.finish_reason, delta.stop_token, delta.prompt_logprobs, delta.vector)
    return Output(delta.token_ids, *told)
