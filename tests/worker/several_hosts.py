"""Nodes whose ranks run on several hosts: host 0 in the test's process, each other one a process at a loopback address
of its own."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_factory import assemble
from kvferry.worker.engine_parts import EngineParts
from tests.redis_servers import LOOPBACK, free_ports

SECRET = "of these hosts alone"
FOLLOWER = """
import asyncio, pickle, sys
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.log import set_up_log
from kvferry.worker.hosts.follower import serve_follower
settings, patches = pickle.load(sys.stdin.buffer)
for module, name, value in patches:
    setattr(sys.modules[module], name, value)
set_up_log("info")
try:
    asyncio.run(serve_follower(settings))
except ConfigError as error:
    sys.exit(f"{error.param}: {error.message}")
"""
Patch = tuple[str, str, Any]


def hosts_of(path: Path, hosts: int, ranks: int | None = None, **settings: Any) -> WorkerSettings:
    """Settings of host 0 of a node on so many hosts, one rank each."""
    given: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "kernels": "reference", "kv_blocks": 64, "block_size": 8,
        "master_addr": LOOPBACK, "master_port": free_ports(1)[0], "threads": 1, "cluster_secret": SECRET,
    }  # fmt: skip
    return WorkerSettings(model=str(path), nnodes=hosts, tensor_parallel_size=ranks or hosts, **given | settings)


class Follower:
    """Process of host `number`. patches: constants of modules that it sets first."""

    def __init__(self, first: WorkerSettings, number: int, patches: tuple[Patch, ...] = (), **settings: Any) -> None:
        own: dict[str, Any] = {"host": f"127.0.0.{number + 1}", "port": free_ports(1)[0], "node_rank": number}
        self.settings = replace(first, **own | settings)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER], stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self.process.stdin is not None
        self.process.stdin.write(pickle.dumps((self.settings, patches)))
        self.process.stdin.close()

    def ready(self) -> dict[str, Any]:
        """What /ready says; empty until the server listens."""
        try:
            url = f"http://{self.settings.host}:{self.settings.port}/ready"
            return dict(httpx.get(url, trust_env=False, timeout=5.0).json())
        except httpx.HTTPError:
            return {}

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def ended(self, limit_s: float = 15.0) -> tuple[int, str]:
        """Exit status and log, once it has ended."""
        assert self.process.stderr is not None
        status = self.process.wait(limit_s)
        return status, self.process.stderr.read().decode()


@contextmanager
def follower(first: WorkerSettings, number: int = 1, **options: Any) -> Iterator[Follower]:
    made = Follower(first, number, **options)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        assert made.process.stderr is not None
        made.process.stderr.close()


@asynccontextmanager
async def on_hosts(path: Path, hosts: int, **settings: Any) -> AsyncIterator[tuple[EngineParts, list[Follower]]]:
    """A node's parts and the processes of its other hosts."""
    first = hosts_of(path, hosts, **settings)
    with ExitStack() as stack:
        others = [stack.enter_context(follower(first, number)) for number in range(1, hosts)]
        yield await asyncio.to_thread(assemble, first), others
