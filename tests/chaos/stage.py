"""The cluster under test: Valkey, two routers, two prefill and two decode nodes, each a real process under the
project's own supervisor, at addresses that stay the same over restarts, each with a way to Redis of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx

from kvferry.cli.child import Child, Command
from kvferry.cli.child_commands import PREFILL_NICENESS
from kvferry.cli.preflight import valkey_binary
from kvferry.cli.supervisor import Backoff, Supervisor
from tests.chaos.network import Network
from tests.chaos.plan import DECODES, NODES, PREFILLS, ROUTERS
from tests.chaos.redis_proxy import Ways
from tests.chaos.zygote import ForkedChild, Zygote

TESTS = Path(__file__).parents[1]
START_S = 180.0
CONTROL_S = 8.0
RESTART_S = 2.0
"""Between a process's end and its next start: what loading a real model would take, or some of it."""
MODEL, SECRET = "chaos", "the secret of a disturbed cluster"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the cluster is run. model: "tiny" (a random one, of which many fit on a small machine) or what --model takes;
    step_ms, token_us: least length of a step, see disturbed.py; kv_blocks: such that one decode node has room for the
    32 streams of both; network: nodes in namespaces, over tcp alone; features: what is off by default is on (canary,
    fetches, tiers on disk and in a store, roles that change)."""

    home: Path
    model: str = "tiny"
    step_ms: float = 30.0
    token_us: float = 200.0
    kv_blocks: int = 1000
    network: bool = False
    extra: tuple[str, ...] = ()
    features: bool = False


@dataclass
class Stage:
    """The running cluster. `log` gets every line of its processes."""

    shape: Shape
    supervisor: Supervisor
    log: TextIO
    urls: dict[str, str] = field(default_factory=dict)
    ways: Ways | None = None
    network: Network | None = None

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


def tiny_model(path: Path) -> Path:
    """A random model of which any two nodes of one instruction set make the same bits."""
    if not (path / "config.json").exists():
        code = (
            "import sys; from pathlib import Path; from tests.cluster.tiny_checkpoints import save_checkpoint\n"
            "save_checkpoint(Path(sys.argv[1]), 'LlamaConfig', num_attention_heads=2, num_key_value_heads=2,\n"
            "                max_position_embeddings=1536)"
        )
        env = os.environ | {"PYTHONPATH": str(TESTS.parent)}
        subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True, stderr=subprocess.DEVNULL)
    return path


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _valkey(port: int) -> Command:
    """On a port: its clients are cut off by proxies and in other network namespaces."""
    options = {"--port": port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--loglevel": "nothing"}
    words = [str(word) for option in options.items() for word in option]
    argv = (str(valkey_binary()), *words)
    return Command("valkey", argv, reports=False, ends_last=True, address=f"redis://127.0.0.1:{port}/0")


def command(stage: Stage, name: str, *options: str) -> Command:
    """A router or worker through its test-only door."""
    shape, role = stage.shape, name.rpartition("-")[0]
    env = {"CHAOS_DIR": str(shape.home), "CHAOS_NAME": name}
    assert stage.ways is not None
    env |= {"KVFERRY_CLUSTER_SECRET": SECRET}
    env |= {"CHAOS_STEP_MS": str(shape.step_ms), "CHAOS_TOKEN_US": str(shape.token_us), "OMP_WAIT_POLICY": "PASSIVE"}
    words = ["--model", shape.model, "--served-model-name", MODEL, "--log-level", "info", *options]
    redis = f"redis://127.0.0.1:{stage.ways.ports[name]}/0"
    inside = ""
    if stage.network is not None and name in NODES:
        inside, redis = stage.network.space(name), f"redis://{stage.network.gateway}:{stage.ways.ports[name]}/0"
    argv = (inside, role, "--redis-url", redis, *words)
    return Command(name, argv, env, niceness=PREFILL_NICENESS if role == "prefill" else 0)


def worker_options(stage: Stage, name: str) -> list[str]:
    host = stage.network.address(name) if stage.network is not None else "127.0.0.1"
    words = {"--node-id": name, "--host": host, "--port": free_port(), "--link-port": free_port(), "--threads": 1}
    words |= {"--kv-blocks": stage.shape.kv_blocks, "--drain-timeout": 2}
    if stage.network is not None:
        words |= {"--ucx-transports": "tcp,self", "--ucx-net-devices": "eth0"}
    if stage.shape.features:
        home = stage.shape.home
        words |= {"--canary-rate": 0.2, "--kv-disk-path": home / f"{name}.tier", "--kv-disk-gib": 0.05}
        words |= {"--kv-remote-url": f"file://{home}/store", "--kv-remote-gib": 0.2}
    own = [str(word) for pair in words.items() for word in pair]
    own += ["--elastic"] if stage.shape.features else []
    return own + (["--batch-invariant", "--dtype", "bfloat16"] if not stage.shape.extra else list(stage.shape.extra))


class ForkingSupervisor(Supervisor):
    """Its children start as forks, and again after the same short time, however often they are killed."""

    def __init__(self, zygote: Zygote, echo: Callable[[str], None]) -> None:
        super().__init__(echo, lambda child: None, lambda: Backoff(first_s=RESTART_S, most_s=RESTART_S))
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
        if shape.network:
            made.network = stack.enter_context(Network.made(NODES))
        redis = free_port()
        supervisor.start(_valkey(redis))
        made.ways = Ways((*ROUTERS, *NODES), "0.0.0.0" if made.network else "127.0.0.1", redis)
        stack.callback(made.ways.close)
        children = []
        for name in (*ROUTERS, *PREFILLS, *DECODES):
            if name in ROUTERS:
                port = free_port()
                made.urls[name] = f"http://127.0.0.1:{port}"
                data = shape.home / f"{name}.data"
                data.mkdir(exist_ok=True)
                options = ["--port", str(port), "--data-dir", str(data), "--max-inflight", "4096"]
                options += ["--fetch", "--elastic", "--elastic-rest", "10"] if shape.features else []
            else:
                options = worker_options(made, name)
            children.append(supervisor.fork(command(made, name, *options)))
        waiting = asyncio.create_task(supervisor.ready(children))
        await asyncio.wait({waiting, supervisor.failure}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if supervisor.failure.done():
            supervisor.failure.result()
        assert all(child.ready.is_set() for child in children), f"not all were ready within {START_S} s"
        await made.routers_see(len(NODES), 20)
        try:
            yield made
        finally:
            for child in supervisor.children:
                child.signal(signal.SIGCONT)
