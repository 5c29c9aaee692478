"""A whole local cluster for tests: `kvferry serve` as a user starts it, found and ended by process id."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.protocol.lease import NodeLease
from tests.forked_cluster import fork_server
from tests.forked_process import ForkedProcess
from tests.waiting import wait_for

START_S = 120.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
MODEL = "SmolLM2-135M-Instruct"
Served = subprocess.Popen[str] | ForkedProcess


@dataclass
class LocalCluster:
    """A running cluster. `log` collects its stderr lines."""

    process: Served
    url: str
    ready_line: str
    seconds_to_ready: float
    log: list[str] = field(default_factory=list)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=120.0, max_retries=0)

    def children(self, role: str) -> list[psutil.Process]:
        """Live processes of `kvferry <role>` (or valkey-server)."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if role in child.cmdline() or child.name() == role:
                    found.append(child)
        return found

    @property
    def redis_url(self) -> str:
        """Its socket, once it listens there."""
        (valkey,) = self.children("valkey-server")
        found: list[str] = []
        wait_for(lambda: found.extend(each.laddr for each in valkey.net_connections("unix") if each.laddr) or found)
        return f"unix://{found[0]}"

    def leases(self) -> list[NodeLease]:
        """What the registry says, read as any process would."""

        async def read() -> list[NodeLease]:
            store = RedisStore(self.redis_url, "default")
            try:
                return list(await store.nodes())
            finally:
                await store.close()

        return asyncio.run(read())

    def worker(self, node_id: str) -> psutil.Process:
        """The live process of this node."""
        (found,) = [child for child in self.children(node_id) if "--node-id" in child.cmdline()]
        return found

    def worker_urls(self, role: str) -> list[str]:
        return [lease.http_url for lease in self.leases() if lease.role == role]

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until every pool's books balance with nothing active or granted, and the router counts no request;
        fails with the books otherwise. A process that died may still have a lease: it does not count once that is gone.
        A request's last byte reaches its client before the router has counted its tokens."""
        last: list[dict[str, float] | str] = []

        def settled() -> bool:
            last.clear()
            for url in [lease.http_url for lease in self.leases()]:
                try:
                    samples = scrape(url)
                except httpx.TransportError as error:
                    last.append(f"{url}: {error}")
                    return False
                last.append(books(samples))
                if not idle(samples):
                    return False
            inflight = value(scrape(self.url), "kvferry_requests_inflight")
            last.append(f"requests at the router: {inflight:.0f}")
            return inflight == 0

        wait_for(settled, seconds, lambda: str(last))


Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: str) -> Samples:
    """Every sample of a process's metrics: name to (labels, value)."""
    found: Samples = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=10).text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """Sum of a metric over all samples with at least these labels; the metric must exist."""
    return sum(number for found, number in samples[name] if labels.items() <= found.items())


def books(samples: Samples) -> dict[str, float]:
    return {labels["state"]: number for labels, number in samples["kvferry_kv_blocks"]}


def idle(samples: Samples) -> bool:
    """Whether free + active + cached + granted is the pool and nobody uses a block."""
    now = books(samples)
    assert sum(now.values()) == value(samples, "kvferry_kv_pool_blocks"), now
    return now["active"] == 0 and now["granted"] == 0


def _end_with_parent() -> None:
    """Between fork and exec: Linux ends the cluster when the tests end, be it by SIGKILL."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


@contextmanager
def local_cluster(
    *args: str,
    inside: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    forked: bool = True,
    step_s: float = 0.0,
    token_s: float = 0.0,
) -> Iterator[LocalCluster]:
    """`kvferry serve --port 0 …`; ended with SIGTERM, and by id if that does not do.

    inside: a command that becomes the one that follows it, in other surroundings. env: further variables. forked: its
    processes are forks of one that has imported what they need; with `inside` or `env` each starts as for users.
    step_s, token_s: seconds that each engine step of forked processes lasts at least, and for each prompt token."""
    words = ["serve", "--port", "0", *args]
    began = time.monotonic()
    data = tempfile.TemporaryDirectory(prefix="kvferry-")
    given = {**_environment(), "KVFERRY_DATA_DIR": data.name, **(env or {})}
    forks = forked and not inside and not env
    assert forks or not step_s + token_s, "only forked processes are paced"
    process: Served = fork_server().serve(words, given, step_s, token_s) if forks else subprocess.Popen(
        [*inside, sys.executable, "-m", "kvferry.cli.main", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, preexec_fn=_end_with_parent, env=given,
    )  # fmt: skip
    log: list[str] = []
    threading.Thread(target=_collect, args=(process.stderr, log), daemon=True).start()
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        match = re.search(r"http://[\w.:\[\]]+", line)
        assert match, f"no ready line: {line!r}\n" + "\n".join(log)
        yield LocalCluster(process, match.group(), line, time.monotonic() - began, log)
    finally:
        watchdog.cancel()
        _end(process)
        data.cleanup()


@contextmanager
def streams_running(cluster: LocalCluster, model: str, count: int) -> Iterator[None]:
    """Streams that decode is busy with: enough of them, and computing a prompt there costs more than shipping it, also
    where a tiny model computes in a millisecond what takes two to hand over."""
    ending, started = threading.Event(), threading.Semaphore(0)

    def run(seed: int) -> None:
        body = {"model": model, "prompt": [seed + 3] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not ending.is_set():
            with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    started.release()
                    if ending.is_set():
                        break

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert started.acquire(timeout=30)
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join(30)


def _end(process: Served) -> None:
    children = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    for child in children:
        if child.is_running():
            child.kill()


def _collect(stream: object, log: list[str]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        log.append(line.rstrip())


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("KVFERRY_")}
