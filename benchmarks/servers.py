"""Starts and ends a server under measurement, and reads the memory and CPU of its processes."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.load import Target
from benchmarks.subjects import Launch

ROOT = Path(__file__).resolve().parent.parent
START_S, STOP_S = 600.0, 15.0


class StartError(Exception):
    """A server ended or never answered; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. ready_s: seconds from its command to its first 200."""

    target: Target
    ready_s: float
    process: psutil.Process

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def running(launch: Launch, port: int, log: Path) -> Iterator[Server]:
    """Run the server of `launch` until exit, then end all its children. Raises StartError."""
    began, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    with started(launch, url, log) as process:
        ready_s = time.perf_counter() - began
        headers = {"authorization": f"Bearer {launch.key}"} if launch.key else {}
        model = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()["data"][0]["id"]
        yield Server(Target(url, model), ready_s, process)


@contextmanager
def started(launch: Launch, url: str, log: Path) -> Iterator[psutil.Process]:
    """Run the process of `launch`, at that URL, until exit, then end all its children. Raises StartError."""
    with log.open("wb") as output:
        popen = subprocess.Popen(
            launch.argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(launch),
            stdin=subprocess.DEVNULL,
            process_group=0,  # no interrupt of a terminal, and the scheduler weighs it as the benchmark's own
        )
    process = psutil.Process(popen.pid)
    try:
        _until_ready(popen, url + launch.ready, log)
        yield process
    finally:
        _end(popen, process)


def environment(launch: Launch) -> dict[str, str]:
    """Return our environment without the settings of threads.

    Those are chosen for kvferry (sleeping barriers make llama.cpp several times slower); each engine has its own
    defaults."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))}
    return ours | dict(launch.env)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def memory_gb(processes: Sequence[psutil.Process]) -> tuple[float, float]:
    """Return (resident, proportional) memory in GB: shared pages count in each process, or once."""
    resident = proportional = 0.0
    for process in processes:
        with suppress(psutil.Error):
            info = process.memory_full_info()
            resident, proportional = resident + info.rss / 1e9, proportional + info.pss / 1e9
    return resident, proportional


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return CPU seconds used so far by the processes that still run."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Suspend these processes meanwhile, since idle threads of vLLM spin on the cores of the measured server."""
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def hidden_percent(server: Server) -> dict[str, float]:
    """Return the share of ship time hidden behind compute, by the metrics of the prefill and decode processes."""
    ship_s, exposed_s = (_metric(server, f"kvferry_ship_{part}seconds_total") for part in ("", "exposed_"))
    return {"hidden_percent": 100 * (1 - exposed_s / ship_s)} if ship_s else {}


def _metric(server: Server, name: str) -> float:
    """Return the sum of a metric over the workers among the children."""
    total = 0.0
    for child in server.processes():
        if not {"prefill", "decode"} & set(child.cmdline()):
            continue
        for connection in child.net_connections():
            if connection.status == psutil.CONN_LISTEN:
                total += _sum_of(f"http://127.0.0.1:{connection.laddr.port}/metrics", name)
    return total


def _sum_of(url: str, name: str) -> float:
    """Return the sum of a metric at one address; 0 where another protocol listens."""
    try:
        text = httpx.get(url, timeout=2, trust_env=False).text
    except httpx.HTTPError:
        return 0.0
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def _until_ready(popen: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(timeout=2, trust_env=False) as client:
        while popen.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(0.05)
    raise StartError("\n".join(log.read_text(errors="replace").splitlines()[-5:]) or "its log is empty")


def _end(popen: subprocess.Popen[bytes], process: psutil.Process) -> None:
    """Send SIGTERM to the server, then SIGKILL to its remaining processes."""
    family = process.children(recursive=True) if process.is_running() else []
    popen.terminate()
    try:
        popen.wait(STOP_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    for child in family:
        if child.is_running():
            child.kill()
