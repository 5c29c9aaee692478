"""Engines of others as the cluster's nodes: vLLM, or the mock that speaks its protocol, and an adapter beside each."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.cli.child import Command
from kvferry.cli.engines import ENGINES as COMMANDS
from kvferry.cli.engines import NICENESS, Start

VLLM_ARGS = "--dtype float32 --enforce-eager --max-model-len 2048 --block-size 32 --num-gpu-blocks-override 600"
"""float32: in bfloat16 the greedy tokens of vLLM's CPU build depend on the requests that run beside."""
STEP_S = 0.05
"""Length of a step of the mock."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """kind: mock or vllm; python: the interpreter of vLLM's environment; args: more arguments for vLLM."""

    kind: str = "mock"
    python: str = ""
    args: str = VLLM_ARGS

    @property
    def seeded(self) -> bool:
        """Whether it survives seeded requests: vLLM's CPU build dies of one whose prompt is computed in parts."""
        return self.kind == "mock"

    @property
    def prompt_share(self) -> float:
        """Share of the usual length that prompts have: on one core vLLM reads some 200 tokens of a real model a second,
        and a node of random weights 17,000."""
        return 1.0 if self.kind == "mock" else 1 / 4

    @property
    def crowd_share(self) -> float:
        """Share of the usual number of clients that a crowd has."""
        return 1.0 if self.kind == "mock" else 1 / 8

    @property
    def restart_s(self) -> float:
        """Longest time from an engine's death until its node is ready again."""
        return 60.0 if self.kind == "mock" else 240.0


def engine_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def pin(name: str) -> tuple[str, ...]:
    """Words before a command that keep the engine of that name on one core."""
    return ("taskset", "-c", str(int(name.rpartition("-")[2]) % (os.cpu_count() or 1)))


def engine_command(shape: EngineShape, home: Path, name: str, model: str, served: str, port: int) -> Command:
    """An engine at a port that stays the same over restarts. One that starts takes a core for a minute: as on a machine
    of its own, it takes no core of another engine."""
    if shape.kind == "mock":
        behaviour = json.dumps({"step_s": STEP_S})
        mock = (sys.executable, "-m", "tests.engine_adapter.mock_vllm", str(port), behaviour)
        return Command(name, mock, reports=False, address=engine_url(port))
    start = Start(model, served, "127.0.0.1", port, f"ipc://{home}/{name}.events", f"ipc://{home}/{name}.replay")
    core = pin(name)[-1]
    argv = (*pin(name), *COMMANDS["vllm"](shape.python, start), *shlex.split(shape.args))
    env = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": core, "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return Command(name, argv, env, reports=False, niceness=NICENESS, address=engine_url(port))


def adapter_options(shape: EngineShape, home: Path, name: str, engine: str, url: str, port: int) -> list[str]:
    """Words of `kvferry adapt` for the engine of that name at the URL."""
    words = ["--engine", "vllm", "--url", url, "--node-id", name, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--drain-timeout", "2"]
    if shape.kind == "vllm":
        words += ["--kv-events", f"ipc://{home}/{engine}.events", "--kv-events-replay", f"ipc://{home}/{engine}.replay"]
    return words


def processes(pid: int) -> list[psutil.Process]:
    """An engine's process and those that it started, parents first."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def send(members: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for member in members:
        try:
            member.send_signal(number)
        except psutil.NoSuchProcess:
            continue
