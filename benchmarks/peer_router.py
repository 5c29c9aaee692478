"""Runs `vllm-router`, if it is installed, in front of a mock worker, as a peer for the router benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from benchmarks import servers
from benchmarks.load import Target
from benchmarks.lone_router import LoneRouter
from benchmarks.mock_http import HOST
from benchmarks.mock_nodes import MODEL
from benchmarks.router_rows import completion_s
from benchmarks.subjects import Launch

POLICY = "round_robin"
"""Its cheapest policy; it renders and tokenises nothing."""


@asynccontextmanager
async def peer_router(command: Path, folder: Path) -> AsyncIterator[LoneRouter]:
    """Run the peer and its worker until exit; the log is in `folder`. Raises StartError."""
    port, behind = servers.free_port(), servers.free_port()
    mock = [sys.executable, "-m", "benchmarks.mock_openai", str(behind)]
    worker = subprocess.Popen(mock, cwd=servers.ROOT, stdin=subprocess.PIPE)  # noqa: ASYNC220
    url = f"http://{HOST}:{behind}"
    argv = [str(command), "--worker-urls", url, "--policy", POLICY, "--host", HOST, "--port", str(port)]
    argv += ["--prometheus-port", str(servers.free_port())]
    try:
        _until_up(url)
        launch = Launch((*argv, "--log-level", "error"), "/v1/models")
        with servers.running(launch, port, folder / "peer.log") as server:
            target = Target(server.target.url, MODEL)
            yield LoneRouter(target, server.process, lambda tokens: completion_s(Target(url, MODEL)))
    finally:
        worker.communicate(timeout=servers.STOP_S)


def _until_up(url: str) -> None:
    with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=10)) as client:
        client.get(f"{url}/v1/models").raise_for_status()
