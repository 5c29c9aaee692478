"""Processes as Kubernetes runs them: started, asked whether they are ready, asked to end, never started again by
themselves; and clients of a Service in front of the routers, who try nothing twice and know every right token."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvferry.cli.child import Command
from tests.chaos.asking import Answered, Tokens
from tests.chaos.commands import free_port
from tests.chaos.load import Clients, difference
from tests.chaos.redis_proxy import Ways
from tests.chaos.shape import MODEL
from tests.chaos.zygote import ForkedChild, Zygote
from tests.redis_servers import redis_server

PODS = {"router": 3, "prefill": 3, "decode": 6}
"""So many of each may be started in one house: each has a way to Redis of its own."""
PRE_STOP_S = 0.5
"""From a pod's leaving the Service to its SIGTERM; the manifests say five seconds."""
PROBE_S = 0.1
STEP_MS = 20
ODD = ("never retrieved", "Traceback", "Task was destroyed")


@dataclass(eq=False)
class Pod:
    name: str
    url: str
    child: ForkedChild
    run: asyncio.Task[int]

    async def asks(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; 0 where nobody answers in time."""
        with suppress(httpx.HTTPError, ValueError):
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
                answer = await client.get(self.url + path)
                return answer.status_code, answer.json()
        return 0, None

    async def ready(self) -> bool:
        """As its readiness probe finds it."""
        return (await self.asks("/ready"))[0] == 200

    async def is_ready(self, within_s: float = 60.0) -> Pod:
        async with asyncio.timeout(within_s):
            while not await self.ready():
                assert not self.run.done(), f"{self.name} ended with status {self.run.result()}"
                await asyncio.sleep(PROBE_S)
        return self

    def signal(self, number: signal.Signals) -> None:
        self.child.signal(number)

    async def ends(self, within_s: float = 100.0) -> float:
        """SIGTERM; the seconds until it is gone."""
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        async with asyncio.timeout(within_s):
            assert await asyncio.shield(self.run) == 0
        return time.monotonic() - began

    async def is_killed(self) -> None:
        self.signal(signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(self.run), 10)


@dataclass
class Met:
    """What clients met while they ran. pause_s: the longest time without a token, the first one's wait included."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    pause_s: float = 0.0


class House:
    """Redis, and the pods of one test. `log` has their lines."""

    def __init__(self, stack: AsyncExitStack, zygote: Zygote, home: Path, model: Path, redis_port: int) -> None:
        self._zygote, self._home, self._model = zygote, home, model
        self._numbers = {role: itertools.count() for role in PODS}
        self.ways = Ways([f"{role}-{n}" for role, count in PODS.items() for n in range(count)], "127.0.0.1", redis_port)
        stack.callback(self.ways.close)
        self.pods: list[Pod] = []
        self.log: list[str] = []
        self.endpoints: list[Pod] = []

    async def start(self, role: str, *options: str, redis: bool = True) -> Pod:
        """A pod of the role, as soon as its process runs. redis: whether it reaches it."""
        name, port = f"{role}-{next(self._numbers[role])}", free_port()
        if not redis:
            self.ways.order(name, "cut")
        words = ["--model", str(self._model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--redis-url", f"redis://127.0.0.1:{self.ways.ports[name]}/0"]
        if role == "router":
            words += ["--data-dir", str(self._home / name)]
        else:
            words += ["--node-id", name, "--threads", "1", "--kv-blocks", "500", "--dtype", "bfloat16"]
            words += ["--batch-invariant", "--drain-timeout", "120"]
        env = {"CHAOS_DIR": str(self._home), "CHAOS_NAME": name, "OMP_WAIT_POLICY": "PASSIVE"}
        env |= {"CHAOS_STEP_MS": str(STEP_MS), "CHAOS_TOKEN_US": "50"}
        command = Command(name, ("", role, *words, *options), env, niceness=5 if role == "prefill" else 0)
        child = ForkedChild(self._zygote, command, self.log.append)
        pod = Pod(name, f"http://127.0.0.1:{port}", child, asyncio.create_task(child.run_once(), name=name))
        self.pods.append(pod)
        while child.pid is None:  # noqa: ASYNC110 - its first step starts it
            await asyncio.sleep(0)
        return pod

    async def ready(self, role: str, *options: str) -> Pod:
        """A pod of the role that is ready; a router's is behind the Service then."""
        pod = await (await self.start(role, *options)).is_ready()
        if role == "router":
            self.endpoints.append(pod)
        return pod

    async def leave_service(self, pod: Pod) -> None:
        """What happens first to a router's pod that is to end."""
        self.endpoints.remove(pod)
        await asyncio.sleep(PRE_STOP_S)

    async def known(self, **counts: int) -> None:
        """Every router behind the Service sees so many nodes of each role ready."""
        async with asyncio.timeout(30):
            for pod in self.endpoints:
                while True:
                    _, body = await pod.asks("/ready")
                    if body and all(body["nodes"][role] == count for role, count in counts.items()):
                        break
                    await asyncio.sleep(PROBE_S)

    def cut(self, *pods: Pod) -> None:
        for pod in pods:
            self.ways.order(pod.name, "cut")

    def heal(self, *pods: Pod) -> None:
        for pod in pods:
            self.ways.order(pod.name, "heal")

    def told(self, pod: Pod, words: str) -> int:
        """Lines of the pod's log that say so."""
        return sum(line.startswith(f"[{pod.name}]") and words in line for line in self.log)

    async def end(self) -> None:
        for pod in self.pods:
            if not pod.run.done():
                pod.signal(signal.SIGKILL)
        await asyncio.gather(*(pod.run for pod in self.pods), return_exceptions=True)


@asynccontextmanager
async def house(zygote: Zygote, home: Path, model: Path) -> AsyncIterator[House]:
    """Nothing of it runs afterwards, and its processes said nothing odd."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server())
        made = House(stack, zygote, home, model, server.port)
        stack.push_async_callback(made.end)
        yield made
    assert not [line for line in made.log if any(words in line for words in ODD)], "\n".join(made.log)


class Service:
    """Clients of the routers behind it. `right`: the answer of each body, from a house that nobody disturbs."""

    def __init__(self, house: House, bodies: list[dict[str, Any]]) -> None:
        self._house, self._bodies = house, bodies
        self.right: list[Tokens] = []
        self.met = Met()
        self._turn = itertools.count()

    async def learn(self) -> None:
        self.right = await asyncio.gather(*(self._ask(body, lambda tokens: None) for body in self._bodies))

    @asynccontextmanager
    async def busy(self, streams: int = 6) -> AsyncIterator[Met]:
        """So many streams at any time, each followed by the next; the block begins once all have begun, and what is
        under way when it ends is seen to its end."""
        self.met, stop, begun = Met(), asyncio.Event(), [asyncio.Event() for _ in range(streams)]
        running = [asyncio.create_task(self._stream(number, begun[number], stop)) for number in range(streams)]
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(each.wait() for each in begun))
            yield self.met
        finally:
            stop.set()
            await asyncio.gather(*running)

    async def _stream(self, number: int, begun: asyncio.Event, stop: asyncio.Event) -> None:
        for turn in itertools.count(number):
            if stop.is_set():
                return
            await self.once(turn % len(self._bodies), begun)

    async def once(self, which: int, begun: asyncio.Event | None = None) -> None:
        """One request; what it met is noted."""
        last = time.monotonic()

        def came(tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            self.met.pause_s, last = max(self.met.pause_s, now - last), now
            if begun:
                begun.set()

        try:
            error = difference(await self._ask(self._bodies[which], came), self.right[which])
        except (Answered, httpx.HTTPError, OSError, ValueError, KeyError) as broken:
            error = f"{type(broken).__name__}: {broken}"
        if error:
            self.met.failures.append(error)
        else:
            self.met.answered += 1

    async def _ask(self, body: dict[str, Any], came: Any) -> Tokens:
        """Over a connection of its own, at the next of the routers."""
        pods = self._house.endpoints
        pod = pods[next(self._turn) % len(pods)]
        clients = Clients({pod.name: pod.url}, (), lambda *_: False)
        try:
            return (await clients.ask(pod.name, body | {"stream": True}, came))[0]
        finally:
            await clients.close()
