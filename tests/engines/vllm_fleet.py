"""Real vLLM servers with adapters behind a router."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.models import saved_directory
from kvferry.model_files.source import DEMO_MODEL, resolve
from tests.chaos.engines import EngineShape, adapter_options, engine_command, pin, processes, send
from tests.engine_adapter.fleet import SERVED, Engine, Fleet, Process, fleet
from tests.redis_servers import free_ports

START_S = 420.0
"""vLLM compiles nothing here and still needs half a minute on a quiet machine, minutes on a busy one."""
PYTHON = os.environ.get("KVFERRY_TEST_VLLM", "")


def model_directory() -> Path:
    """The demo model in vLLM's format, made once."""
    if not PYTHON:
        pytest.skip("KVFERRY_TEST_VLLM names no interpreter with vLLM; make test-engines makes one")
    found = saved_directory(resolve(DEMO_MODEL, weights=False).path)
    if found is None:
        pytest.skip("accelerate is not installed, which saving the model needs")
    return found


def add_vllm(
    made: Fleet,
    number: int,
    model: Path,
    *args: str,
    words: tuple[str, ...] = (),
    env: Mapping[str, str] = {},
    pinned: bool = True,
) -> Engine:
    """Start the engine of that number with its adapter; returns before they are ready.

    args, env: more of vLLM's; words: more of the adapter's; pinned: to a core of its own."""
    port, adapter_port = free_ports(2)
    shape = EngineShape("vllm", PYTHON)
    name = f"engine-{number}"
    command = engine_command(shape, made.folder, name, str(model), SERVED, port)
    start = list(command.argv[0 if pinned else len(pin(name)) :])
    argv = ["nice", "-n", str(command.niceness), *start, *args]
    server = Process(argv, made.folder / f"{name}.log", {**os.environ, **command.env, **env})
    node = f"vllm-{number}"
    own = adapter_options(shape, made.folder, node, name, command.address, adapter_port)
    events = own[own.index("--kv-events") :]
    return made.adapt("vllm", node, command.address, server, adapter_port, *events, *words)


def kill(engine: Engine) -> None:
    """Kill all processes of an engine at once, as the end of its container does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send(processes(engine.server.popen.pid), signal.SIGKILL)


@contextmanager
def vllm_fleet(engines: int = 2) -> Iterator[Fleet]:
    """So many engines of one model behind a router, all ready; nothing of them runs afterwards."""
    model = model_directory()
    with fleet() as made:
        try:
            for number in range(engines):
                add_vllm(made, number, model)
            made.start_router(str(model))
            made.ready(engines, START_S)
            yield made
        finally:
            for engine in made.engines:
                kill(engine)
