"""A node as a process: a thread that ends takes the process with it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.node_entry import NodeEntry
from kvferry.router.nodes.token_streams import TokenStreams
from kvferry.runtime.suspend_aware_clock import LoopClock
from tests.crowded import in_time
from tests.fake_workers import lease_of
from tests.forked_process import ForkedProcess
from tests.forked_python import WORKERS, forked_python
from tests.waiting import until

SCRIPT = Path(__file__).with_name("breakable_node.py")


@dataclass
class Node:
    """The script's process and where it answers."""

    process: ForkedProcess
    url: str


@contextmanager
def node(*args: str) -> Iterator[Node]:
    """The script, once it has said that it is ready."""
    process = forked_python(WORKERS).piped([str(SCRIPT), *args])
    try:
        assert process.stdout
        report = json.loads(process.stdout.readline())
        assert report["status"] == "ready"
        yield Node(process, report["url"])
    finally:
        process.kill()
        process.wait()


@contextmanager
def running(*args: str) -> Iterator[ForkedProcess]:
    with node(*args) as found:
        yield found.process


@pytest.mark.parametrize(
    ("part", "fault", "within_s"),
    [
        ("engine ended", "the engine thread ended: injected", 1.5),
        ("link ended", "the link thread ended: RuntimeError: injected", 1.5),
        ("books wrong", "self-check failed: injected", 1.5),
        ("engine hung", "a step of the engine has taken", 4.0),
        ("link hung", "an iteration of the link thread has taken", 4.0),
        ("all hung", "a step of the engine has taken", 6.0),
    ],
)
def test_a_thread_that_ends_or_hangs_takes_its_process_with_it(part: str, fault: str, within_s: float) -> None:
    with running(part) as process:
        began = time.monotonic()
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 1
        assert in_time(time.monotonic() - began, within_s)
        assert out == "withdrawn\n"
        assert [line for line in err.splitlines() if " exits at once" in line and fault in line], err


@pytest.mark.parametrize("part", ["engine ended", "loop hung"])
def test_a_registry_that_hangs_keeps_no_broken_node_alive(part: str) -> None:
    with running(part, "hung") as process:
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=8)
        assert (process.returncode, out) == (1, "")


def test_a_process_that_was_frozen_finds_its_threads_alive() -> None:
    with running("engine hung") as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_signal_drains_and_ends_with_status_0() -> None:
    with running("engine ended") as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert process.returncode == 0
        assert out == "withdrawn\n"


async def test_a_router_notices_at_once_that_a_node_died_and_in_two_seconds_that_it_is_frozen() -> None:
    with node("engine ended") as found:
        process, url = found.process, found.url
        epoch = int(await asyncio.to_thread(lambda: httpx.get(f"{url}/epoch").text))
        entry = NodeEntry(lease_of("d1", "decode", epoch, http_url=url), CapacitySummary("m"))
        clock = LoopClock()
        clock.start()
        streams = TokenStreams(NodeClient("router", clock=clock.now))
        streams.keep([entry])
        await until(lambda: entry.open)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.7)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert entry.linked, "a moment's silence is none"
        process.send_signal(signal.SIGSTOP)
        await until(lambda: not entry.open)
        assert entry.linked
        assert await until(lambda: not entry.linked) < 2.0
        process.send_signal(signal.SIGCONT)
        await until(lambda: entry.open)
        process.kill()
        assert await until(lambda: not entry.linked) < 1.0
        clock.stop()
        await streams.close()
