"""The faults of a plan, committed at their time, of two equal processes to one at a time; and what came of each."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import httpx

from tests.chaos.acts import ACTS, Acts
from tests.chaos.load import Clients
from tests.chaos.plan import ROUTERS, Fault
from tests.chaos.stage import Stage

AWAY_S = 3.0
"""Until a node has noticed that its engine is gone."""
TAKES_AWAY = ("kill", "freeze", "hang", "drain", "clock and kill", "cut off", "half open", "sever")
"""Beginnings of kinds that take a process from the others: of two equal ones only one at a time."""


@dataclass
class Done:
    """A fault that happened, or, where it `failed`, could not. Times are monotonic seconds. recovered_s: from its
    beginning until the process was ready again; None: it was never away, or did not come back."""

    fault: Fault
    at: float
    until: float = 0.0
    recovered_s: float | None = None
    note: str = ""
    failed: bool = False


class Deeds:
    """Commits the faults of a plan. `router_disturbed` is what clients ask about their own router."""

    def __init__(self, stage: Stage, clients: Clients, seed: int) -> None:
        self._stage, self._acts = stage, Acts(stage, clients, seed)
        self.done: list[Done] = []
        self.spared: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, plan: list[Fault], began: float) -> None:
        """Every fault at its time; returns when all are taken back."""
        for fault in plan:
            await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            if self._alone(fault):
                self.spared.append(fault)
                continue
            done = Done(fault, time.monotonic())
            print(
                f"{done.at:.2f} [chaos] {fault.at_s} {fault.kind} {fault.target} {fault.seconds} {fault.number}",
                file=self._stage.log,
            )
            self.done.append(done)
            self._tasks.add(asyncio.create_task(self._do(done)))
        await asyncio.gather(*self._tasks)

    def router_disturbed(self, router: str, began: float, ended: float) -> bool:
        """Whether a fault of this router itself touched this time."""
        own = (done for done in self.done if done.fault.target == router and "router" in done.fault.kind)
        return any(done.at < ended and (not done.until or done.until + 1.0 > began) for done in own if not done.failed)

    @property
    def _processes(self) -> tuple[str, ...]:
        """Those of which another one is the like."""
        return (*self._stage.roster.nodes, *self._stage.roster.engines, *ROUTERS)

    def _alone(self, fault: Fault) -> bool:
        """Whether the process that the fault would take away is the only one of its role that is there, or has gone
        already."""
        target = fault.target
        if not fault.kind.startswith(TAKES_AWAY) or target not in self._processes:
            return False
        target = self._stage.roster.node(target)
        role, _, number = target.rpartition("-")
        other = f"{role}-{1 - int(number)}"
        now = [done.fault for done in self.done if not done.until and done.fault.kind.startswith(TAKES_AWAY)]
        away = {self._stage.roster.node(fault.target) for fault in now}
        return not self._stage.ready(other) or not self._stage.ready(target) or bool({other, target} & away)

    async def _do(self, done: Done) -> None:
        fault = done.fault
        try:
            done.note = await ACTS[fault.kind](self._acts, fault) or ""
        except (OSError, httpx.HTTPError) as error:
            done.note, done.failed = repr(error), True
        if not done.failed and fault.target in self._processes and fault.kind.startswith(TAKES_AWAY):
            await self._recovered(done)
        done.until = time.monotonic()

    async def _recovered(self, done: Done) -> None:
        """Until the process says that it is ready."""
        stage, name = self._stage, self._stage.roster.node(done.fault.target)
        while name != done.fault.target and stage.ready(name) and time.monotonic() < done.at + AWAY_S:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while time.monotonic() < done.at + stage.recovery_s:
                url = stage.child(name).url
                if stage.ready(name) and url:
                    with suppress(httpx.HTTPError):
                        if (await client.get(f"{url}/ready")).status_code == 200:
                            done.recovered_s = time.monotonic() - done.at
                            return
                await asyncio.sleep(0.1)
        done.note += " did not come back"
