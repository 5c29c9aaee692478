"""A small cluster of mock engines with their adapters behind a router: each a process of its own, ended by its id."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.forked_process import ForkedProcess
from tests.forked_python import ROUTERS, forked_python
from tests.redis_servers import RedisServer, free_ports, redis_server
from tests.waiting import wait_for

START_S = 120.0
SERVED = "toy"


@dataclass
class Process:
    """A running process, with its output in a file. forked: where it runs this Python, it is a fork of a process that
    has imported what it needs."""

    argv: list[str]
    log: Path
    env: dict[str, str] | None = None
    forked: bool = True
    popen: subprocess.Popen[bytes] | ForkedProcess = field(init=False)

    def __post_init__(self) -> None:
        program, *words = self.argv
        with self.log.open("ab") as out:
            if self.forked and program == sys.executable:
                self.popen = forked_python(ROUTERS).start(words, out.fileno(), out.fileno(), self.env)
            else:
                self.popen = subprocess.Popen(self.argv, stdout=out, stderr=subprocess.STDOUT, env=self.env)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait(10)


@dataclass
class Engine:
    """A mock engine and its adapter."""

    name: str
    url: str
    adapter_url: str
    server: Process
    adapter: Process

    def behave(self, **changes: Any) -> dict[str, Any]:
        """Change how the mock behaves; returns what it counted."""
        told: dict[str, Any] = httpx.post(f"{self.url}/mock", json=changes, timeout=10).json()
        return told


@dataclass
class Fleet:
    """The running cluster. forked: its processes are forks of one that has imported what they need."""

    redis: RedisServer
    folder: Path
    forked: bool = True
    router_url: str = ""
    router: Process | None = None
    engines: list[Engine] = field(default_factory=list)

    def kvferry(self, name: str, *words: str) -> Process:
        argv = [sys.executable, "-m", "kvferry.cli.main", *words, "--redis-url", self.redis.url]
        return Process(argv, self.folder / f"{name}.log", forked=self.forked)

    def add(
        self, module: str = "tests.engine_adapter.mock_vllm", kind: str = "vllm", *words: str, **behaviour: Any
    ) -> Engine:
        """Start a mock engine with its adapter; returns before they are ready."""
        port, adapter_port = free_ports(2)
        name, url = f"{kind}-{port}", f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", module, str(port), json.dumps(behaviour)]
        server = Process(argv, self.folder / f"{name}.log", forked=self.forked)
        return self.adapt(kind, name, url, server, adapter_port, *words)

    def adapt(self, kind: str, name: str, url: str, server: Process, port: int, *words: str) -> Engine:
        """Start the adapter of a server that has been started."""
        adapter = self.kvferry(
            f"adapter-{name}", "adapt", "--engine", kind, "--url", url, "--port", str(port),
            "--node-id", name, "--served-model-name", SERVED, *words,
        )  # fmt: skip
        engine = Engine(name, url, f"http://127.0.0.1:{port}", server, adapter)
        self.engines.append(engine)
        return engine

    def start_router(self, model: str, *words: str) -> None:
        (port,) = free_ports(1)
        self.router_url = f"http://127.0.0.1:{port}"
        self.router = self.kvferry(
            "router", "router", "--port", str(port), "--model", model, "--served-model-name", SERVED, *words
        )

    def ready(self, nodes: int, within_s: float = START_S) -> None:
        """Wait until the router knows so many decode nodes."""

        def known() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.nodes() >= nodes
            return False

        wait_for(known, within_s, self.logs)

    def nodes(self) -> int:
        """Return how many decode nodes the router knows. Raises httpx.TransportError."""
        told: dict[str, int] = httpx.get(f"{self.router_url}/ready?nodes=1", timeout=5).json()["nodes"]
        return told["decode"]

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in [self.router, *(each for e in self.engines for each in (e.adapter, e.server))]:
            if process is not None:
                process.end()


@contextlib.contextmanager
def fleet(*, forked: bool = True) -> Iterator[Fleet]:
    with redis_server() as redis, tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        running = Fleet(redis, Path(folder), forked)
        try:
            yield running
        finally:
            running.end()


@dataclass
class Answer:
    """What a client saw of one stream. route: of the response's header."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str = ""
    route: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


def ask(fleet: Fleet, prompt: list[int], max_tokens: int = 16, **more: Any) -> Answer:
    """Stream a completion of token ids to its end."""
    answer = Answer()
    body = {"model": SERVED, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True, "temperature": 0, **more}  # fmt: skip
    with httpx.stream("POST", f"{fleet.router_url}/v1/completions", json=body, timeout=120) as response:
        answer.route = response.headers.get("x-kvferry-route", "")
        if response.status_code != 200:
            answer.error = response.read().decode()
            return answer
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = json.dumps(chunk["error"])
                continue
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                answer.tokens += choice.get("token_ids") or []
                answer.times.append(time.monotonic())
                answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                answer.finish = choice.get("finish_reason") or answer.finish
    return answer
