"""Command lines of the processes of a disturbed cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from kvferry.cli.child import Command
from kvferry.cli.child_commands import PREFILL_NICENESS
from kvferry.cli.preflight import valkey_binary
from tests.chaos.engines import adapter_options, engine_command, engine_url
from tests.chaos.network import Network
from tests.chaos.plan import ROUTERS
from tests.chaos.redis_proxy import Ways
from tests.chaos.shape import MODEL, SECRET, Shape

TESTS = Path(__file__).parents[1]


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


def valkey(port: int) -> Command:
    """On a port: its clients are cut off by proxies and in other network namespaces."""
    options = {"--port": port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--loglevel": "nothing"}
    words = [str(word) for option in options.items() for word in option]
    argv = (str(valkey_binary()), *words)
    return Command("valkey", argv, reports=False, ends_last=True, address=f"redis://127.0.0.1:{port}/0")


class Commands:
    """Makes each process's command line, with addresses that stay the same over restarts.

    ways: each process's own way to Redis; network: None: all processes share this machine's."""

    def __init__(self, shape: Shape, ways: Ways, network: Network | None) -> None:
        self._shape, self._ways, self._network = shape, ways, network
        self._engine_ports = {name: free_port() for name in shape.roster.engines}

    def engines(self) -> list[Command]:
        shape = self._shape
        return [
            engine_command(shape.engines, shape.home, name, shape.model, MODEL, port)
            for name, port in self._engine_ports.items()
            if shape.engines is not None
        ]

    def router(self, name: str, port: int) -> Command:
        data = self._shape.home / f"{name}.data"
        data.mkdir(exist_ok=True)
        options = ["--port", str(port), "--data-dir", str(data), "--max-inflight", "4096"]
        options += ["--fetch", "--elastic", "--elastic-rest", "10"] if self._shape.features else []
        return self._command(name, "router", *self._model(), *options)

    def node(self, name: str) -> Command:
        shape = self._shape
        if shape.engines is None:
            return self._command(name, name.rpartition("-")[0], *self._model(), *self._worker_options(name))
        engine = next(engine for engine in shape.roster.engines if shape.roster.node(engine) == name)
        url = engine_url(self._engine_ports[engine])
        return self._command(name, "adapt", *adapter_options(shape.engines, shape.home, name, engine, url, free_port()))

    def _model(self) -> tuple[str, str]:
        return "--model", self._shape.model

    def _command(self, name: str, role: str, *options: str) -> Command:
        """A process of kvferry through its test-only door."""
        shape, port = self._shape, self._ways.ports[name]
        env = {"CHAOS_DIR": str(shape.home), "CHAOS_NAME": name, "KVFERRY_CLUSTER_SECRET": SECRET}
        env |= {
            "CHAOS_STEP_MS": str(shape.step_ms),
            "CHAOS_TOKEN_US": str(shape.token_us),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        redis, inside = f"redis://127.0.0.1:{port}/0", ""
        if self._network is not None and name not in ROUTERS:
            inside, redis = self._network.space(name), f"redis://{self._network.gateway}:{port}/0"
        words = ["--redis-url", redis, "--served-model-name", MODEL, "--log-level", "info", *options]
        return Command(name, (inside, role, *words), env, niceness=PREFILL_NICENESS if role == "prefill" else 0)

    def _worker_options(self, name: str) -> list[str]:
        shape, home = self._shape, self._shape.home
        host = self._network.address(name) if self._network is not None else "127.0.0.1"
        words = {"--node-id": name, "--host": host, "--port": free_port(), "--link-port": free_port(), "--threads": 1}
        words |= {"--kv-blocks": shape.kv_blocks, "--drain-timeout": 2}
        if self._network is not None:
            words |= {"--ucx-transports": "tcp,self", "--ucx-net-devices": "eth0"}
        if shape.features:
            words |= {"--canary-rate": 0.2, "--kv-disk-path": home / f"{name}.tier", "--kv-disk-gib": 0.05}
            words |= {"--kv-remote-url": f"file://{home}/store", "--kv-remote-gib": 0.2}
        own = [str(word) for pair in words.items() for word in pair]
        own += ["--elastic"] if shape.features else []
        return own + (["--batch-invariant", "--dtype", "bfloat16"] if not shape.extra else list(shape.extra))
