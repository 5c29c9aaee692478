"""A router's nodes and dispatches in one process on the virtual clock, and its clients, who know every right token."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.model_files.model_name import ModelName
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.request_context import RequestContext
from tests.virtual.arithmetic import INFO, expected
from tests.virtual.clock import Process, State
from tests.virtual.plan import Asked
from tests.virtual.registry import Reached

METRICS = RouterMetrics()
GRACE_S = 0.5
"""A client is answered by its deadline, and so much more."""
BUSY_S = 2.0
"""In half of a deadline that is shorter, a node that is only busy makes no token and is taken for lost."""
EARLY_S = 1e-6
"""What a sum of times may lack."""


class VirtualRouter:
    def __init__(self, world: Any, process: Process) -> None:
        self.world, self.process = world, process
        self.store = Reached(world.store, world.weather)

    async def start(self) -> None:
        nodes = NodeTable(self.store, METRICS, clock=self.world.loop.time)
        client = NodeClient(self.process.name, clock=self.world.loop.time)
        self.cluster = RouterCluster(self.store, self.store, METRICS, nodes=nodes, client=client)
        self.pool = self.cluster.pool(ModelName(INFO.name))
        await self.cluster.open()
        self.nodes = nodes

    def kill(self) -> None:
        self.process.kill()
        self.world.wires.kill(self.process)

    def remains(self) -> list[str]:
        """Bookings, listeners and errands that are left."""
        left = [f"{self.process.name}: {key}: booked" for key, entry in self.nodes.entries.items() if not entry.idle]
        return left + [f"{self.process.name}: errands"] * bool(self.pool.background_calls.open)


class Client:
    """One request. outcome: "done", the code of its error, or none while it is under way."""

    def __init__(self, router: VirtualRouter, asked: Asked, name: str) -> None:
        self.router, self.asked, self.name = router, asked, name
        self.outcome, self.tokens, self.took_s = "", [], 0.0
        self.began = self.first_at = self.last_at = router.world.loop.time()
        self._frozen_s = router.process.frozen_s

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of it."""
        return bool(self.outcome) or self.router.process.state is State.DEAD

    async def run(self) -> None:
        world, asked = self.router.world, self.asked
        began = world.loop.time()
        call = RequestContext(
            self.name, began, began + asked.deadline_s, first_by=began + asked.first_s, itl_s=asked.itl_s,
            is_background=asked.patient,
        )  # fmt: skip
        work = Generate(SamplingParams(max_tokens=asked.tokens, temperature=0.0))
        try:
            dispatch = self.router.pool.start(RequestSpec(call, self.name, asked.prompt, work))
            if asked.leaves_s is not None:
                leaving = asyncio.get_running_loop().call_later(
                    asked.leaves_s, lambda: self.router.process.task(self._leave(dispatch))
                )
            finished = None
            dispatch.listen(self._take)
            async for output in dispatch:
                self._take(output)
                finished = output.finish_reason
            self.outcome = "done" if finished else "unfinished"
            if asked.leaves_s is not None:
                leaving.cancel()
        except KvferryError as error:
            self.outcome = error.code
        self.took_s = world.loop.time() - began
        self._check()

    @property
    def met(self) -> bool:
        """Whether it got all its tokens, within its targets."""
        gaps, asked = len(self.tokens) - 1, self.asked
        in_time = self.first_at - self.began <= asked.first_s and self.last_at - self.first_at <= asked.itl_s * gaps
        return self.outcome == "done" and in_time

    def _take(self, output: Output) -> None:
        self.last_at = self.router.world.loop.time()
        self.first_at = self.first_at if self.tokens else self.last_at
        self.tokens.extend(output.token_ids)

    async def _leave(self, dispatch: Any) -> None:
        await dispatch.cancel()

    def _check(self) -> None:
        right = expected(self.asked.prompt, self.asked.tokens)
        blame = self.router.world.blame
        if tuple(self.tokens) != right[: len(self.tokens)]:
            blame(f"{self.name}: {self.tokens} instead of {right}")
        if self.outcome == "unfinished" or (self.outcome == "done" and len(self.tokens) != len(right)):
            blame(f"{self.name}: {self.outcome} after {len(self.tokens)} of {len(right)} tokens")
        if self.took_s > self.asked.deadline_s + GRACE_S + self.router.process.frozen_s - self._frozen_s:
            blame(f"{self.name}: {self.outcome} after {self.took_s:.1f} s of {self.asked.deadline_s:g}")
        if not self._may_be():
            blame(f"{self.name}: {self.outcome} after {self.took_s:.1f} s, for no reason")

    def _may_be(self) -> bool:
        """Whether there is a reason for this outcome: too few nodes only where some were away, other errors of nodes
        and registry only where some were disturbed."""
        asked, world = self.asked, self.router.world
        if self.outcome == "cancelled":
            return asked.leaves_s is not None
        if self.outcome == "deadline_exceeded":
            return self.took_s > asked.deadline_s - EARLY_S
        if self.outcome == "no_nodes" and (world.plan.faults or asked.deadline_s < BUSY_S):
            return True
        return self.outcome in ("done", "unfinished", "overloaded") or (
            self.outcome != "server_error" and world.disturbed
        )
