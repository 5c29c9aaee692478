"""One schedule: a plan carried out on the virtual clock, and what must hold of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import Counter

from kvferry.cluster_state.memory_store import MemoryStore
from tests.kv_transfer.fault_injection import Faults
from tests.virtual.clock import Process, VirtualLoop
from tests.virtual.deeds import Deeds, living
from tests.virtual.links import VirtualNetwork
from tests.virtual.nodes import VirtualNode
from tests.virtual.patched import virtual
from tests.virtual.plan import Plan
from tests.virtual.routers import Client, VirtualRouter
from tests.virtual.weather import Weather
from tests.virtual.wires import Lanes, Wires

IDLE_S = 60.0
"""Once nothing goes wrong any more and no client waits, all holds must be gone by then: a job's deadline, and the
longest wait for a peer that says nothing."""
CALM_IDLE_S = 1.5
"""Where nothing went wrong: a cancel reaches everything in a second."""
LONGEST_S = 120.0
LEAST_DONE = 0.8
"""Share of the clients that were answered at all, and did not leave, who got all that they asked for."""
AFTER_S = 1.0
"""Faults go on for so long once the last client was answered."""


class World(Deeds):
    """A plan's processes, network and clients; `wrong` is what must not have happened, as far as it was seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.loop = plan, VirtualLoop()
        self.rng = random.Random(f"run {plan.seed}")
        self.weather = Weather.of(self.rng)
        self.lanes = Lanes(self.loop, self.weather)
        self.wires = Wires(self.loop, self.lanes)
        self.network = VirtualNetwork(self.lanes, self.blame)
        self.store = MemoryStore(clock=self.loop.time)
        self.corrupted = self.dropped = 0
        self.faults = Faults(
            drop=self._drops, duplicate=lambda data: self.weather.chance(plan.duplicate), corrupt=self._corrupts
        )
        self.wrong: list[str] = []
        self.nodes: list[VirtualNode] = []
        self.routers: list[VirtualRouter] = []
        self.clients: list[Client] = []
        self.processes: list[Process] = []
        self.healed = False

    def blame(self, what: str) -> None:
        self.wrong.append(f"{self.loop.time():.4f} {what}")

    def run(self) -> list[str]:
        """What was wrong; nothing, as a rule."""
        with virtual(self):
            self.loop.set_exception_handler(lambda loop, context: self.blame(f"{context}"))
            try:
                self.loop.run_until_complete(self._live())
            except Exception as error:
                self.blame(f"the schedule ended: {error!r}")
            finally:
                self._clean_up()
        return self.wrong

    @property
    def calm(self) -> bool:
        return self.plan.calm and not self.weather.very_late

    @property
    def disturbed(self) -> bool:
        """Whether there was a reason for a client to be told of nodes."""
        return not self.plan.gentle or self.weather.very_late > 0

    def outcomes(self) -> Counter[str]:
        return Counter(client.outcome or "lost" for client in self.clients)

    @property
    def trace(self) -> int:
        """Of all that happened, as far as it can be seen: equal for equal runs."""
        told = [(c.outcome, c.tokens, c.took_s) for c in self.clients]
        return zlib.crc32(repr((told, self.weather.draws, self.wrong)).encode())

    # The schedule.

    async def _live(self) -> None:
        for role, count, port in (("prefill", self.plan.prefills, 100), ("decode", self.plan.decodes, 200)):
            for number in range(count):
                self.nodes.append(self._start_node(role, port + number))
        await asyncio.sleep(0.2)
        self.routers = [self._start_router() for _ in range(self.plan.routers)]
        await asyncio.sleep(1.0)
        begun = self.loop.time()
        for fault in self.plan.faults:
            self.loop.call_at(begun + fault.at_s, lambda fault=fault: self.do(fault))
        for number, asked in enumerate(self.plan.clients):
            self.loop.call_at(begun + asked.at_s, self._ask, number)
        last = max([0.0, *(asked.at_s for asked in self.plan.clients)])
        await asyncio.sleep(last + 0.01)
        await self._until(self._answered, LONGEST_S, "clients are not answered")
        mended = begun + max((fault.at_s + fault.for_s for fault in self.plan.faults), default=0.0)
        await asyncio.sleep(min(AFTER_S, max(0.0, mended - self.loop.time())))
        self._heal()
        idle_s = CALM_IDLE_S if self.calm else IDLE_S
        await self._until(lambda: not self._remains(), idle_s, "the nodes are not idle", self._remains)
        for node in (node for node in living(self.nodes) if node.joined):
            node.engine.check_integrity()

    async def _until(self, true, most_s: float, what: str, why=lambda: "") -> None:
        until = self.loop.time() + most_s
        while not true():
            if self.loop.time() > until:
                self.blame(f"{what} after {most_s:g} s: {why()}")
                return
            await asyncio.sleep(0.25)

    def _answered(self) -> bool:
        return len(self.clients) == len(self.plan.clients) and all(client.over for client in self.clients)

    def _ask(self, number: int) -> None:
        asked = self.plan.clients[number]
        router = self.routers[asked.router]
        client = Client(router, asked, f"r{number}")
        self.clients.append(client)
        if hasattr(router, "nodes"):
            router.process.task(client.run())
        else:
            client.outcome = "no router"
            if not self.weather.very_late and not any(fault.kind == "kill_router" for fault in self.plan.faults):
                self.blame(f"{client.name}: there is no router")

    def _remains(self) -> list[str]:
        return [left for each in living([*self.nodes, *self.routers]) for left in each.remains()]

    # Processes.

    def _process(self, name: str) -> Process:
        process = Process(self.loop, f"{name}.{len(self.processes)}")
        self.processes.append(process)
        return process

    def _start_node(self, role: str, port: int) -> VirtualNode:
        node = VirtualNode(self, self._process(role), role, port, self.plan.shape)
        node.process.task(node.start())
        return node

    def _start_router(self) -> VirtualRouter:
        router = VirtualRouter(self, self._process("router"))
        router.process.task(router.start())
        return router

    def _heal(self) -> None:
        self.healed = True
        for process in self.processes:
            process.thaw()
        for at in range(len(self.nodes)):
            self.restart(at)

    def _drops(self, data: bytes) -> bool:
        dropped = not self.healed and self.weather.chance(self.plan.drop)
        self.dropped += dropped
        return dropped

    def _corrupts(self, tag: int) -> bool:
        corrupted = self.plan.shape.verify == 1.0 and self.weather.chance(self.plan.corrupt)
        self.corrupted += corrupted
        return corrupted

    def _clean_up(self) -> None:
        self.loop.set_exception_handler(lambda loop, context: None)
        for process in self.processes:
            process.bury()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            self.loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0))
        self.loop.close()


def share_done(outcomes: Counter[str]) -> float:
    """Of the clients that stayed, and whose router did; 1 where there is none."""
    answered = outcomes.total() - sum(outcomes[gone] for gone in ("cancelled", "lost", "no router"))
    return outcomes["done"] / answered if answered else 1.0
