"""The cluster under test: Valkey, two routers, two prefill and two decode nodes, each a real process under the
project's own supervisor, at addresses that stay the same over restarts, each with a way to Redis of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from kvferry.cli.child import Child, Command
from kvferry.cli.supervisor import Backoff, Supervisor
from tests.chaos.commands import Commands, free_port, valkey
from tests.chaos.engines import processes, send
from tests.chaos.network import Network
from tests.chaos.plan import ROUTERS, Roster
from tests.chaos.redis_proxy import Ways
from tests.chaos.shape import Shape
from tests.chaos.zygote import ForkedChild, Zygote

START_S = 180.0
CONTROL_S = 8.0
RECOVERY_S = 60.0
RESTART_S = 2.0
"""Between a process's end and its next start: what loading a real model would take, or some of it."""


@dataclass
class Stage:
    """The running cluster. `log` gets every line of its processes."""

    shape: Shape
    supervisor: Supervisor
    log: TextIO
    urls: dict[str, str] = field(default_factory=dict)
    ways: Ways | None = None
    network: Network | None = None

    @property
    def roster(self) -> Roster:
        return self.shape.roster

    @property
    def recovery_s(self) -> float:
        """Longest time until a process that died is ready again."""
        return self.shape.engines.restart_s if self.shape.engines else RECOVERY_S

    def child(self, name: str) -> Child:
        return next(child for child in self.supervisor.children if child.name == name)

    def pid(self, name: str) -> int | None:
        return self.child(name).pid

    def signal(self, name: str, number: int) -> None:
        """Raises ProcessLookupError where there is no process to send it to."""
        pid = self.pid(name)
        if pid is None:
            raise ProcessLookupError(f"{name} does not run")
        os.kill(pid, number)

    def ready(self, name: str) -> bool:
        """Whether the process has said so since its last start."""
        return self.child(name).ready.is_set() and self.pid(name) is not None

    async def order(self, name: str, deed: str, **values: Any) -> Any:
        """Have the process do something to itself (disturbed.py): what it answers. Raises OSError where it does not
        answer, or says that it could not."""
        async with asyncio.timeout(CONTROL_S):
            reader, writer = await asyncio.open_unix_connection(str(self.shape.home / f"{name}.sock"))
            with closing(writer):
                writer.write(json.dumps({"deed": deed, **values}).encode() + b"\n")
                line = await reader.readline()
        answer = json.loads(line) if line.endswith(b"\n") else {}
        if "answer" not in answer:
            raise OSError(f"{name} {deed}: {answer.get('error', 'no answer')}")
        return answer["answer"]

    async def routers_see(self, count: int, within_s: float) -> None:
        """Wait until each router has this many nodes ready."""
        async with asyncio.timeout(within_s), httpx.AsyncClient(timeout=2, trust_env=False) as client:
            for router in ROUTERS:
                while await self._nodes(client, self.urls[router]) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    @staticmethod
    async def _nodes(client: httpx.AsyncClient, url: str) -> int:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return sum((await client.get(f"{url}/ready")).json()["nodes"].values())
        return 0


class ForkingSupervisor(Supervisor):
    """Its children start as forks, and again after the same short time, however often they are killed."""

    def __init__(self, zygote: Zygote, echo: Callable[[str], None]) -> None:
        super().__init__(echo, lambda child: None, lambda: Backoff(first_s=RESTART_S, max_s=RESTART_S))
        self._zygote = zygote

    def fork(self, command: Command) -> Child:
        """As `start`."""
        child = ForkedChild(self._zygote, command, self._echo)
        task = asyncio.create_task(self._keep(child), name=command.name)
        task.add_done_callback(self._ended)
        self._tasks[child] = task
        return child


@asynccontextmanager
async def stage(shape: Shape) -> AsyncIterator[Stage]:
    """Everything runs and is known to both routers; nothing of it runs afterwards. Raises TimeoutError, and what the
    supervisor gave up for."""
    async with AsyncExitStack() as stack:
        log = stack.enter_context((shape.home / "cluster.log").open("w", buffering=1))
        zygote = Zygote()
        stack.callback(zygote.close)
        supervisor = ForkingSupervisor(zygote, lambda line: print(f"{time.monotonic():.2f} {line}", file=log))
        stack.push_async_callback(supervisor.stop)
        made = Stage(shape, supervisor, log)
        nodes = made.roster.nodes
        if shape.network:
            made.network = stack.enter_context(Network.made(nodes))
        redis = free_port()
        supervisor.start(valkey(redis))
        made.ways = Ways((*ROUTERS, *nodes), "0.0.0.0" if made.network else "127.0.0.1", redis)
        stack.callback(made.ways.close)
        commands = Commands(shape, made.ways, made.network)
        for each in commands.engines():
            supervisor.start(each)
        children = []
        for name in ROUTERS:
            port = free_port()
            made.urls[name] = f"http://127.0.0.1:{port}"
            children.append(supervisor.fork(commands.router(name, port)))
        children += [supervisor.fork(commands.node(name)) for name in nodes]
        waiting = asyncio.create_task(supervisor.ready(children))
        start_s = START_S + made.recovery_s
        await asyncio.wait({waiting, supervisor.failure}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if supervisor.failure.done():
            supervisor.failure.result()
        assert all(child.ready.is_set() for child in children), "not all were ready in time"
        await made.routers_see(len(nodes), 20)
        try:
            yield made
        finally:
            for child in supervisor.children:
                child.signal(signal.SIGCONT)
            for pid in filter(None, map(made.pid, made.roster.engines)):
                send(processes(pid), signal.SIGKILL)
