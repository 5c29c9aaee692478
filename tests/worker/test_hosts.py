"""Nodes whose ranks run on several hosts: what they compute and ship, how they meet, and how they end."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.node import Ending
from tests.toy import make_job
from tests.waiting import until, wait_for
from tests.worker.several_hosts import Follower, follower, hosts_of, on_hosts
from tests.worker.test_rank_processes import answer, assembled, expect_likeliest, prompt, saved
from tests.worker_pair import Router, routed, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four K/V heads."""
    return saved(tmp_path_factory.mktemp("tiny") / "tiny", "LlamaConfig", head_dim=16)


@asynccontextmanager
async def beside_one(path: Path, spread: str, **settings: Any) -> AsyncIterator[Router]:
    """A node on two hosts, of the role `spread`, and one in a single process."""
    alone = await asyncio.to_thread(assembled, path, 1)
    async with on_hosts(path, 2, **settings) as (parts, _):
        assert parts.fingerprint == alone.fingerprint
        assert parts.ranks is not None
        nodes = {spread: parts}
        async with (
            worker("prefill", nodes.get("prefill", alone)) as prefill,
            worker("decode", nodes.get("decode", alone)) as decode,
            routed(prefill, decode) as router,
        ):
            yield router


@pytest.mark.parametrize("spread", ["prefill", "decode"])
async def test_two_hosts_compute_what_one_process_does_and_ship_either_way(path: Path, spread: str) -> None:
    async with beside_one(path, spread) as router:
        tokens = prompt(100)
        made, reuse = await answer(router, "a", tokens)
        expect_likeliest(path, tokens, made)
        assert reuse.computed == 100
        longer = [*tokens, *made, 5]
        made, reuse = await answer(router, "b", longer)
        expect_likeliest(path, longer, made)
        assert (reuse.reused_prefill, reuse.computed) == (96, 29)
        longest = [*longer, *made, 6]
        await router.generate(make_job("c", longest, 24))
        await until(lambda: router.finished("c"))
        expect_likeliest(path, longest, router.tokens("c"))
        await router.prefill.settle()
        await router.decode.settle()


@asynccontextmanager
async def decoding(path: Path) -> AsyncIterator[tuple[Router, Follower]]:
    """A decode node on two hosts that runs a stream."""
    async with on_hosts(path, 2) as (parts, (other,)), worker("decode", parts, tensor_parallel_size=2) as node:
        assert other.ready()["status"] == "ready"
        router = Router(node, node, "router")
        await router.connect()
        await router.generate(make_job("a", prompt(100), 100))
        await until(lambda: router.tokens("a"))
        try:
            yield router, other
        finally:
            await router.close()


async def test_a_host_that_is_asked_to_stop_has_the_node_drain_first(path: Path) -> None:
    async with decoding(path) as (router, other):
        other.process.terminate()
        ending = await asyncio.wait_for(asyncio.shield(router.decode.run), 15.0)
        assert ending is Ending.DRAINED
        assert router.finished("a"), "it had the time"
        assert not router.failed
        status, _ = await asyncio.to_thread(other.ended)
        assert status == 0


@pytest.mark.parametrize("who", ["host", "rank"])
async def test_a_host_or_a_rank_of_it_that_dies_takes_the_node_with_it(path: Path, who: str) -> None:
    async with decoding(path) as (router, other):
        (rank,) = other.ranks()
        (rank if who == "rank" else psutil.Process(other.process.pid)).kill()
        assert await until(lambda: router.decode.loaded.fault) < 1.0
        late = "the engine thread ended: the 2 ranks can no longer compute together"
        assert (router.decode.loaded.fault or "").startswith(("host 1 (127.0.0.2) ", late))
        await asyncio.wait_for(asyncio.shield(router.decode.run), 5.0)
        assert not router.failed, "routers are to try another node, and no request is to blame"
        await asyncio.to_thread(wait_for, lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        status, told = await asyncio.to_thread(other.ended)
        assert status == (1 if who == "rank" else -signal.SIGKILL)
        assert who == "host" or "rank 1 ended (signal 9)" in told


async def test_a_host_that_stands_still_does_too_and_ends_once_it_goes_on(path: Path) -> None:
    async with decoding(path) as (router, other):
        process = psutil.Process(other.process.pid)
        process.suspend()
        assert await until(lambda: router.decode.loaded.fault) < 5.0
        assert router.decode.loaded.fault == "host 1 (127.0.0.2) has not sent a heartbeat for 3 s"
        process.resume()
        status, told = await asyncio.to_thread(other.ended)
        assert (status, "host 0 at 127.0.0.1" in told) == (1, True)


FIRST = """
import pickle, sys, threading
from kvferry.worker.engine_factory import assemble
parts = assemble(pickle.load(sys.stdin.buffer))
print("ready", flush=True)
threading.Event().wait()
"""


@contextmanager
def host_0(settings: WorkerSettings) -> Iterator[subprocess.Popen[bytes]]:
    """A process of host 0, which loads its part and then waits."""
    made = subprocess.Popen([sys.executable, "-c", FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert made.stdin is not None
    assert made.stdout is not None
    try:
        made.stdin.write(pickle.dumps(settings))
        made.stdin.close()
        yield made
    finally:
        made.kill()
        made.wait()
        made.stdout.close()


def test_a_host_ends_with_host_0_and_another_one_joins_the_next_host_0(path: Path) -> None:
    settings = hosts_of(path, 2)
    with follower(settings) as one, follower(settings) as two:
        with host_0(settings) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"ready\n"
            wait_for(lambda: one.ready()["ready"] or two.ready()["ready"])
            joined, waiting = (one, two) if one.ready()["ready"] else (two, one)
            wait_for(lambda: "has joined already" in waiting.ready()["reason"])
            (rank,) = joined.ranks()
            first.kill()
            status, told = joined.ended()
            assert (status, "host 0 at 127.0.0.1" in told) == (1, True)
            wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
        with host_0(settings) as again:
            assert again.stdout is not None
            assert again.stdout.readline() == b"ready\n"
            wait_for(lambda: waiting.ready()["ready"])
