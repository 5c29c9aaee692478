"""A node: the real engine, dock, role, streams and membership in one process on the virtual clock. What
`worker.runtime` joins with threads, a UCX link and an HTTP server, is joined here without them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.elastic_worker.service import ElasticService
from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.send_window import SendWindow
from kvferry.protocol.errors import Draining, RoleChangeRefused
from kvferry.protocol.lease import NodeLease, Rates
from kvferry.protocol.messages import CancelRequest, Pulse
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import read_message
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.event_relay import EventRelay
from kvferry.worker.membership import Membership, new_epoch
from kvferry.worker.rates import RateMeter
from kvferry.worker.roles import RoleChange, Roles
from kvferry.worker.service import NodeParts
from kvferry.worker.streams import RouterStreams
from kvferry.worker.tier_factory import OpenTiers
from kvferry.worker.transfer_stats import TransferStats
from tests.later_checksums import LaterChecksums
from tests.virtual.arithmetic import BLOCK_SIZE, FINGERPRINT, INFO, Arithmetic, make_engine
from tests.virtual.clock import Process
from tests.virtual.links import LateLink, VirtualLink
from tests.virtual.registry import Reached
from tests.virtual.server import Routes, Served

BLOCK_BYTES = 16


class CountedTogether(WorkerMetrics):
    """Of all nodes that began in a role, whatever role they have since."""

    def count_as(self, role: str) -> None:
        if not hasattr(self, "role"):
            super().count_as(role)


METRICS = {role: CountedTogether(role) for role in ("prefill", "decode")}


class PumpedEngine(EngineLoop):
    """The engine's thread as events of its process: a turn, then what it took. slow_s: of the next turn alone."""

    def __init__(
        self,
        engine: Engine,
        process: Process,
        on_events: Any,
        delay_s: Callable[[], float],
        step_s: float,
        stream_s: float,
    ):
        super().__init__(engine, on_events)
        self._stream_s = stream_s
        self.slow_s = 0.0
        self._process, self._delay_s, self._step_s, self._armed = process, delay_s, step_s, False

    def submit(self, call: Callable[[Engine], None], *, urgent: bool = False) -> None:
        self._inbox.append(call)
        self._arm(self._delay_s())

    def _arm(self, delay_s: float) -> None:
        if not self._armed:
            self._armed = True
            self._process.soon(delay_s, self._pump)

    def _pump(self) -> None:
        """Commands, a step, news; what comes meanwhile waits for the next."""
        calls = list(self._inbox)
        self._inbox.clear()
        self._engine.cancellations.forget()
        ran = self._turn(calls)
        self._armed, slow_s, self.slow_s = False, self.slow_s, 0.0
        if self._inbox or (ran and self._engine.has_work()):
            beside = max(0, self.load.running_requests - 1)
            self._arm(slow_s + self._step_s + self._stream_s * beside + self._delay_s())


class VirtualNode:
    """One process of a node, from `start` to its death."""

    def __init__(self, world: Any, process: Process, role: str, port: int, shape: Any) -> None:
        self.world, self.process, self.role, self.port, self.shape = world, process, role, port, shape
        self.name = f"{role}-{port}"
        self.store = Reached(world.store, world.weather)
        self.joined = self.ready = self.leaving = self.draining = False

    async def start(self) -> None:
        self.epoch = await new_epoch(cast(RedisStore, self.store), self.name)
        self._join()
        self.joined = True
        await self.membership.join()
        self.ready = True

    def _join(self) -> None:
        world, process, shape = self.world, self.process, self.shape
        delay_s, loop = world.weather.delay_s, world.loop
        self.engine = make_engine(
            shape.blocks[self.role], shape.budget, shape.seqs, recurrent=shape.recurrent, windowed=shape.windowed
        )
        runner = cast(Arithmetic, self.engine.runner)
        holds, cancel, runner.blame = self.engine.pool.holds, self.engine.cancel, world.blame

        def cancelled(request_id: str, attempt: int) -> None:
            runner.left[request_id] = attempt
            cancel(request_id, attempt)

        self.engine.cancel = cancelled  # type: ignore[method-assign]
        self.inner = VirtualLink(world.network, f"10.0.0.1:{self.port}", process, runner, holds)
        self.link = LateLink(self.inner, world.faults)
        self.dock = Dock(
            self.link, runner, verify=shape.verify, checksums=LaterChecksums(self.link.submit),
            window=SendWindow(shape.window * BLOCK_BYTES), clock=loop.time,
        )  # fmt: skip
        self.loop_engine = PumpedEngine(
            self.engine, process, lambda events: news.take(events), delay_s, shape.step_s[self.role], shape.stream_s
        )
        clock, routes, self.rates = LoopClock(), Routes(), RateMeter(Rates(5000.0, shape.step_s["decode"], 1e8))
        self.streams = RouterStreams(self.epoch, Pulse, lambda router: self.service.router_lost(router), clock)
        app = cast(FastAPI, routes)
        self.streams.mount(app)
        parts = SimpleNamespace(
            fingerprint=FINGERPRINT,
            layout=SimpleNamespace(block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE),
            media=None,
            engine=self.engine,
        )
        self.roles = Roles(self.role, self.role)
        self.metrics = METRICS[self.role]
        self.service = ElasticService(
            NodeParts(
                settings=WorkerSettings(role=self.role), epoch=self.epoch, app=app, metrics=self.metrics,
                parts=cast(EngineParts, parts), engine=self.loop_engine, dock=self.dock, rates=self.rates,
                transfer_stats=TransferStats(), streams=self.streams, tiers=OpenTiers(),
                require_ready=self.require_ready, roles=self.roles, call_soon=self.call_soon,
            )
        )  # fmt: skip
        self.dock.start()
        routes.post("/attempts/cancel")(self._post_cancel)
        self.membership = Membership(
            cast(RedisStore, self.store), self.lease, self.engine.pool.changes.rows, self.metrics
        )
        news = EventRelay(self.service, self.metrics, self.rates, self.membership.note, self.call_soon)
        self.role_change = RoleChange(
            self.roles, self.loop_engine, self.membership, self.metrics, elastic=True, call_soon=self.call_soon,
            drains=self._drains, busy=self._busy, within_s=30.0,
        )  # fmt: skip
        clock.start()
        world.wires.listen(process, "10.0.0.1", self.port, lambda: Served(process, routes))

    async def _post_cancel(self, request: Any) -> None:
        cancel = await read_message(request, CancelRequest)
        self.loop_engine.cancel(cancel.request_id, cancel.attempt)
        self.service.cancel(cancel)

    def call_soon(self, call: Callable[[], None]) -> None:
        """On the loop, in order."""
        lanes = self.world.lanes
        lanes.post(("loop", self.process.name), self.process, call, late_s=self.world.weather.loop_s())

    def lease(self) -> NodeLease:
        return NodeLease(
            self.name, self.roles.now, self.epoch, "draining" if self.draining else "ready",
            f"http://10.0.0.1:{self.port}", self.inner.address,
            FINGERPRINT, INFO.name, 200, self.engine.config.block_size, BLOCK_BYTES, self.loop_engine.load,
            self.rates.rates, max_num_seqs=self.shape.seqs, elastic=True, role_s=self.roles.role_s,
        )  # fmt: skip

    def require_ready(self) -> None:
        if self.draining:
            raise Draining(f"{self.name} is draining")

    async def drain(self) -> None:
        """As `worker.runtime` does it, with all the time in the world: until nothing is under way here."""
        await self.role_change.stop()
        await self.membership.wait_for_replacement(lambda: not self.world.healed and self.streams.followed)
        self.draining = True
        await self.membership.announce()
        while self._busy():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if self.engine.moving:
            self.world.blame(f"{self.process.name}: blocks of moves are held by nobody")
        await self.membership.leave()

    def _busy(self) -> bool:
        return self.loop_engine.busy or self.service.busy()

    def _drains(self, drains: bool) -> None:
        self.draining = drains

    async def change_role(self) -> None:
        """If it may."""
        other = "decode" if self.roles.now == "prefill" else "prefill"
        with contextlib.suppress(RoleChangeRefused):
            await self.role_change.begin(ChangeRole(other))

    def kill(self) -> None:
        self.process.kill()
        self.world.wires.kill(self.process)
        if self.joined:
            self.inner.kill()

    def remains(self) -> list[str]:
        """What is left here of requests that ended."""
        if not self.ready:
            return [f"{self.process.name} is not ready"]
        engine, service = self.engine, self.service
        tables = {
            "drain": self.draining,
            "requests": list(engine.request_table), "ships": engine.transfer_holds.ships, "grants":
            engine.transfer_holds.grants, "attempts": engine.request_table._attempts, "commands":
            self.loop_engine._inbox, "fetches": service.endpoints.fetches._waiting, "asked":
            service.endpoints.fetches._client.transfers._all, "coming": service.endpoints.fetches._in_flight, "given":
            service.endpoints.supplies._supplies, "arrivals": service.endpoints.fetches._arrivals._open,
            "copies sent": engine.copies._transfer_holds, "copies landing": engine.copies._landing,
            "held blocks": engine.pool.num_blocks - engine.pool.available,
        }  # fmt: skip
        tables |= {
            "answers": service.prefill._answers, "offers": service.prefill._ships._offers,
            "departures": service.decode._migrations._open, "moves": engine.moving._open,
            "sent": list(service.endpoints.sender.transfers._all),
            "received": list(service.endpoints.arrivals.receiver.transfers._all),
        }  # fmt: skip
        return [f"{self.process.name}: {what}: {left}" for what, left in tables.items() if left]
