"""World: simulation of one trace on one cluster under one policy, with clients, router and lost nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.placement.costs import HANDOFF_S
from kvferry.placement.pairs import CHUNK_TOKENS
from kvferry.protocol.errors import ContextLengthExceeded, Overloaded
from kvferry.protocol.layout import blocks_for
from kvferry.simulate.clock import Action, Clock
from kvferry.simulate.fleet import Fleet, Shape
from kvferry.simulate.node import Node, Run
from kvferry.simulate.policy import Policy
from kvferry.simulate.progress import SimulationProgress
from kvferry.simulate.trace_request import TraceRequest

POLL_S = 0.5
"""Seconds between two reads of the registry by a router."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a node; a new process replaces it `back_s` seconds later.

    share: position of the node among those of its role, from 0 to 1."""

    at: float
    role: str
    share: float
    back_s: float = 30.0


class World:
    """Simulated cluster with its router and clients.

    runs: all requests that have arrived, in order of arrival. pace: called with the requests left as they end."""

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        trace: Sequence[TraceRequest],
        losses: Sequence[Loss] = (),
        pace: SimulationProgress | None = None,
    ) -> None:
        self.clock = Clock()
        self.fleet, self.policy = Fleet(shape, self.clock), policy
        self.trace, self.losses, self._pace = trace, losses, pace
        self.runs: list[Run] = []
        self._unfinished = len(trace)
        self._waiting: deque[Run] = deque()
        self._background: deque[Run] = deque()
        self._displaced: list[Run] = []
        self._after: dict[int, list[TraceRequest]] = {}
        self._placing = False

    async def play(self) -> None:
        """Run until every request has ended."""
        self.policy.enter(self.fleet)
        await self.fleet.announce(list(self.fleet.nodes.values()))
        await self.policy.poll()
        clock = self.clock
        for ask in self.trace:
            if ask.after >= 0:
                self._after.setdefault(ask.after, []).append(ask)
            else:
                clock.at(ask.at, self._arrival(ask))
        for loss in self.losses:
            clock.at(loss.at, lambda loss=loss: self._lose(loss))  # type: ignore[misc]
        clock.soon(0.0, self.fleet.beat)
        clock.soon(0.0, self.fleet.flush)
        clock.soon(POLL_S, self._poll)
        await clock.run(lambda: not self._unfinished)

    async def _poll(self) -> None:
        await self.policy.poll()
        self.clock.soon(POLL_S, self._poll)
        await self._place_waiting()

    def _arrival(self, ask: TraceRequest) -> Action:
        async def arrive() -> None:
            run = Run(ask, self.clock.now)
            self.runs.append(run)
            (self._background if ask.background else self._waiting).append(run)
            await self._place_waiting()

        return arrive

    async def _place_waiting(self) -> None:
        """Place requests that wait at the router, in order, while the policy places them; background ones last."""
        if self._placing:
            return
        self._placing = True
        while self._waiting and await self._placed(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            await self._place_background()
        self._placing = False

    async def _place_background(self) -> None:
        """Place background requests: first those that gave way or have been tried."""
        for run in list(self._displaced):
            if await self._placed(run):
                self._displaced.remove(run)
        while self._background and not self._displaced:
            run = self._background.popleft()
            if not await self._placed(run):
                self._displaced.append(run)

    async def _placed(self, run: Run) -> bool:
        """Place a request, and launch it or let it fail; return False if it has to wait."""
        try:
            choice = await self.policy.choose(run)
        except (ContextLengthExceeded, Overloaded) as error:
            run.failed, run.rejected = True, isinstance(error, Overloaded)
            self._end(run)
            return True
        finally:
            for other in self.policy.displaced():
                self._end_attempt(other)
                self._displaced.append(other)
        if choice is None:
            return False
        run.prefill, run.decode = choice
        self.policy.launched(run)
        self._launch(run)
        return True

    def _launch(self, run: Run) -> None:
        prefill, decode, attempt = run.prefill, run.decode, run.attempt
        assert decode is not None

        def granted(here: int) -> None:
            if run.attempt == attempt:
                run.here = here
                (prefill or decode).compute(run, computed)

        def computed() -> None:
            if run.attempt != attempt:
                return
            self._token(run)
            self.policy.first_token(run)
            (prefill or decode).keep(run, run.ask.hashes[: (run.length - 1) // decode.machine.block_size])
            ships = prefill is not None and run.delivered < run.ask.output_len
            self.clock.at(self._shipped(run) if ships else self.clock.now, landed)

        def landed() -> None:
            if run.attempt != attempt:
                return
            if prefill is not None:
                prefill.release(run)
            decode.keep(run, run.ask.hashes[: (run.length - 1) // decode.machine.block_size])
            self.policy.decoding(run)
            left = run.ask.output_len - run.delivered
            if left > 0:
                decode.join(run, left, ended)
            else:
                ended()

        def ended() -> None:
            if run.attempt == attempt:
                self._finish(run)

        def request_grant() -> None:
            if run.attempt == attempt:
                decode.grant(run, granted)

        begun = partial(self.fleet.encoders[run.ask.model].encode, run, prefill or decode, request_grant)
        if overhead_s := decode.machine.overhead_s:
            self.clock.soon(overhead_s, begun)
        else:
            begun()

    def _token(self, run: Run) -> None:
        run.delivered += 1
        run.last_s = self.clock.now
        if run.first_s < 0:
            run.first_s = self.clock.now

    def _shipped(self, run: Run) -> float:
        """Return when the last block has arrived at decode.

        Blocks travel while later ones are computed, except for those of the last chunk."""
        prefill, decode = run.prefill, run.decode
        assert prefill is not None
        assert decode is not None
        machine = decode.machine
        blocks = max(0, machine.blocks_for(run.length) - run.here)
        block_s = machine.block_bytes / machine.ship_bytes_per_s
        free = max(run.begun_s, prefill.link_free, decode.link_free) + blocks * block_s
        prefill.link_free = decode.link_free = free
        last = min(blocks, blocks_for(CHUNK_TOKENS, machine.block_size))
        return max(free, self.clock.now + last * block_s) + HANDOFF_S

    def _finish(self, run: Run) -> None:
        prefill, decode = run.prefill, run.decode
        assert decode is not None
        run.delivered, run.last_s = run.ask.output_len, self.clock.now
        decode.keep(run, run.ask.hashes)
        if prefill is not None and prefill.alive:
            prefill.copy(run, run.ask.hashes)
        decode.release(run)
        self.policy.ended(run)
        self._end(run)

    def _end(self, run: Run) -> None:
        self._unfinished -= 1
        if self._pace:
            self._pace.report(self._unfinished)
        for ask in self._after.pop(run.ask.number, ()):
            self.clock.soon(ask.at, self._arrival(ask))
        if self._waiting or self._background or self._displaced:
            self.clock.soon(0.0, self._place_waiting)

    def _lose(self, loss: Loss) -> None:
        """Kill a node; its requests start again elsewhere, behind their delivered tokens."""
        nodes = self.fleet.of(loss.role, self.fleet.shape.models[0])
        node = nodes[int(loss.share * len(nodes))]
        gone = node.die()
        self.policy.lost(node)
        under_way = [run for run in self.runs if node in (run.prefill, run.decode) and not run.over]
        for run in dict.fromkeys([*gone, *under_way]):
            self._begin_again(run, node)
        self.clock.soon(loss.back_s, node.live)
        self.clock.soon(0.0, self._place_waiting)

    def _begin_again(self, run: Run, lost: Node) -> None:
        if run.prefill is lost and run.decode is not None and run in run.decode.streams:
            return
        self.policy.ended(run)
        self._end_attempt(run)
        if run.ask.background:
            self._displaced.append(run)
        else:
            self._waiting.appendleft(run)

    def _end_attempt(self, run: Run) -> None:
        """End an attempt on its nodes, also on a dead one: it may have got a grant meanwhile."""
        for node in (run.prefill, run.decode):
            if node is not None:
                node.drop(run)
        run.attempt += 1
        run.prefill = run.decode = None
