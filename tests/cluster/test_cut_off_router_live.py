"""A router that is cut off from Redis learns from nodes that a decode node was restarted, and uses it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers import free_port
from tests.chaos.redis_proxy import Ways
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.crowded import in_time
from tests.forked_process import ForkedProcess
from tests.forked_python import ROUTERS, WORKERS, ForkedPython, forked_python
from tests.redis_servers import RedisServer, redis_server
from tests.waiting import wait_for

START_S, LEARNT_S = 60.0, 2.0
MODEL = "tiny"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.0}


class CutCluster:
    """A router with a way of its own to Redis, and two decode nodes, each a process."""

    def __init__(self, folder: Path, redis: RedisServer, ways: Ways, stack: contextlib.ExitStack) -> None:
        secret = folder / "secret"
        secret.write_text("s" * 40)
        secret.chmod(0o600)
        model = save_checkpoint(folder / "model", "LlamaConfig", num_attention_heads=2, max_position_embeddings=2048)
        self._common = ["--model", str(model), "--served-model-name", MODEL, "--cluster-secret-file", str(secret)]
        self.folder, self.redis, self.ways, self._stack = folder, redis, ways, stack
        self.ports = {name: free_port() for name in ("d1", "d2")}
        self.url = f"http://127.0.0.1:{free_port()}"
        self.nodes = {name: self.node(name) for name in self.ports}
        words = ["--port", self.url.rpartition(":")[2], "--data-dir", str(folder / "data")]
        self._start(forked_python(ROUTERS), "router", ways.ports["router"], words)
        wait_for(lambda: self.decode_nodes() == 2, START_S, lambda: (folder / "router.log").read_text())

    def node(self, name: str) -> ForkedProcess:
        words = ["--node-id", name, "--port", str(self.ports[name]), "--link-port", str(free_port()), "--threads", "1"]
        words += ["--kv-blocks", "200"]
        return self._start(forked_python(WORKERS), "decode", self.redis.port, words, name)

    def decode_nodes(self) -> int:
        """How many the router uses."""
        with contextlib.suppress(httpx.TransportError):
            return int(httpx.get(f"{self.url}/ready?nodes=1", timeout=2).json()["nodes"]["decode"])
        return -1

    def answers(self, name: str) -> bool:
        """Whether the node's model is loaded, and it takes streams of routers."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}/health", timeout=2).json()["progress"] == 1.0
        return False

    def kill(self, name: str) -> None:
        process = self.nodes[name]
        process.kill()
        process.wait(10)

    def learns_of_restarted(self, name: str) -> float:
        """Seconds until the router uses the node, from when it serves."""
        self.nodes[name] = self.node(name)
        wait_for(lambda: self.answers(name), START_S, lambda: (self.folder / f"{name}.log").read_text())
        return wait_for(lambda: self.decode_nodes() == 2, START_S)

    def _start(self, python: ForkedPython, role: str, port: int, words: list[str], name: str = "") -> ForkedProcess:
        words = ["-m", "kvferry.cli.main", role, *self._common, "--redis-url", f"redis://127.0.0.1:{port}/0", *words]
        with (self.folder / f"{name or role}.log").open("ab") as log:
            process = python.start(words, log.fileno(), log.fileno())
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        return process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutCluster]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        ways = Ways(("router",), "127.0.0.1", redis.port)
        stack.callback(ways.close)
        yield CutCluster(tmp_path_factory.mktemp("cut"), redis, ways, stack)


@pytest.mark.parametrize(("deed", "moves"), [("cut", False), ("freeze", True)])
def test_a_node_that_restarts(cluster: CutCluster, deed: str, moves: bool) -> None:
    """At its address or at another one; it serves alone afterwards, so the router does use it."""
    expected = httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=20).json()["choices"]
    cluster.ways.order("router", deed)
    cluster.kill("d1")
    wait_for(lambda: cluster.decode_nodes() == 1)
    if moves:
        cluster.ports["d1"] = free_port()
    assert in_time(cluster.learns_of_restarted("d1"), LEARNT_S)
    cluster.kill("d2")
    wait_for(lambda: cluster.decode_nodes() == 1)
    assert httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=20).json()["choices"] == expected
    cluster.ways.order("router", "heal")
    cluster.learns_of_restarted("d2")


def test_a_node_that_restarts_while_redis_is_frozen_for_all(cluster: CutCluster) -> None:
    """It tells its own lease at its address."""
    cluster.redis.signal(signal.SIGSTOP)
    cluster.kill("d1")
    wait_for(lambda: cluster.decode_nodes() == 1)
    assert in_time(cluster.learns_of_restarted("d1"), LEARNT_S)
    assert httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=20).status_code == 200
    cluster.redis.signal(signal.SIGCONT)
