"""Nodes whose ranks have a pool each, as on GPUs: here on CPUs, over gloo. What they ship, keep and lose."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.ranks.device_group import DeviceGroup
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.rank_channel import RankChannel, RankZeroChannels
from kvferry.worker import block_parts, device_rank_pool, rank
from kvferry.worker.block_parts import Segments
from kvferry.worker.device_rank_pool import DeviceRankPool
from kvferry.worker.device_ranks import DeviceRanks
from kvferry.worker.hosts import remote_parts
from kvferry.worker.hosts.remote_parts import RemotePart
from kvferry.worker.pool_memory import PoolMemory, make_pool
from kvferry.worker.rank_launcher import start_ranks
from kvferry.worker.rank_memory import make_memory
from kvferry.worker.shared_rows import SharedRows
from tests.toy import make_job
from tests.waiting import until, wait_for
from tests.worker.test_rank_processes import (
    DEEPSEEK_GROUPS,
    answer,
    assembled,
    expect_likeliest,
    expect_shipped_and_reused,
    others,
    prompt,
    saved,
    two_ranks,
)
from tests.worker.tiered import count
from tests.worker_pair import Router, routed, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four K/V heads."""
    return saved(tmp_path_factory.mktemp("tiny") / "tiny", "LlamaConfig", head_dim=16)


class Joined:
    """Pools of ranks in this process, the others' on threads. elsewhere: they share no rows, as on other hosts."""

    def __init__(self, layout: KVLayout, ranks: int, blocks: int, *, elsewhere: bool) -> None:
        self.descriptors = [os.memfd_create("rows") for _ in range(ranks)]
        self.file = self.descriptors[0]
        self.pools = [make_pool(layout.of_rank(ranks), blocks, CPU) for _ in range(ranks)]
        rows = [SharedRows(self.file, layout.block_bytes) for _ in range(ranks)]
        parts = [Segments(kv, layout, rank, ranks) for rank, kv in enumerate(self.pools)]
        self.lines = RankZeroChannels(ranks - 1)
        theirs = [RankChannel(os.dup(self.lines.descriptor(rank))) for rank in range(ranks - 1)]
        self.lines.close_inherited()
        self.threads = ThreadPoolExecutor(ranks)
        self.ends = [
            self.threads.submit(remote_parts.follow, line, part)
            if elsewhere
            else self.threads.submit(device_rank_pool.follow, line, part, own)
            for line, part, own in zip(theirs, parts[1:], rows[1:], strict=True)
        ]
        remote = [RemotePart(part.part, self.lines, number) for number, part in enumerate(parts[1:] * elsewhere)]
        self.memory = DeviceRankPool(parts[0], rows[0], self.lines, ranks - 1, layout.block_bytes, remote)

    def end(self) -> None:
        self.lines.close()
        for each in self.ends:
            assert isinstance(each.exception(10.0), EOFError | OSError | IndexError)
        self.threads.shutdown()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture(params=["heads", "latents", "fp8"])
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return {
        "heads": KVLayout(3, 4, 8, "float32", 4),
        "latents": KVLayout(3, 1, 24, "bfloat16", 4, planes=1),
        "fp8": KVLayout(3, 4, 8, "float8_e4m3fn", 4),
    }[request.param]


@pytest.fixture(params=[False, True], ids=["here", "elsewhere"])
def joined(layout: KVLayout, request: pytest.FixtureRequest) -> Iterator[Joined]:
    found = Joined(layout, 2, 6, elsewhere=request.param)
    yield found
    found.end()


def whole_pool(layout: KVLayout, blocks: int) -> torch.Tensor:
    """Of a node of one rank, of random bytes."""
    kv = make_pool(layout, blocks, CPU)
    kv.view(torch.uint8).copy_(torch.randint(0, 256, kv.view(torch.uint8).shape, dtype=torch.uint8))
    return kv


def test_a_block_has_the_bytes_of_one_ranks_node_both_ways(layout: KVLayout, joined: Joined) -> None:
    kv, memory = whole_pool(layout, 6), joined.memory
    plain = PoolMemory(kv)
    for block_id in (4, 1):
        row = memory.to_fill(block_id)
        row[:] = plain.block(block_id)
        memory.landed(block_id, row)
        memory.give_back(row)
    for number, pool in enumerate(joined.pools):
        heads = layout.of_rank(2).num_kv_heads
        first = number * heads if heads < layout.num_kv_heads else 0
        own = kv.view(torch.uint8).narrow(3, first, heads)
        assert torch.equal(pool.view(torch.uint8)[[4, 1]], own[[4, 1]])
        assert not pool.view(torch.uint8)[[0, 2, 3, 5]].any()
    found = [memory.to_send(block_id) for block_id in (4, 1, 0)]
    assert all(np.array_equal(row, plain.block(block_id)) for row, block_id in zip(found[:2], (4, 1), strict=True))
    assert not found[2].any()
    assert found[0].nbytes == memory.block_bytes == layout.block_bytes


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_many_blocks_cross_together(
    at_once: int, layout: KVLayout, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, however many parts are copied at once: there and back, through the other blocks."""
    kv, memory = whole_pool(layout, 6), joined.memory
    monkeypatch.setattr(block_parts, "STAGED", at_once * joined.pools[0][0].nbytes)
    plain, order = PoolMemory(kv), [4, 0, 5, 1, 3]
    rows = memory.room(10)
    for row, block_id in zip(rows, order, strict=False):
        row[:] = plain.block(block_id)
    memory.to_device(rows[:5], order)
    assert not any(pool.view(torch.uint8)[2].any() for pool in joined.pools)
    memory.to_host(order[::-1], rows[5:])
    for row, block_id in zip(rows[5:], order[::-1], strict=True):
        assert np.array_equal(row, plain.block(block_id))


def test_rows_of_tiers_and_rows_that_are_lent_are_never_the_same(layout: KVLayout, joined: Joined) -> None:
    memory, (pool, *_) = joined.memory, joined.pools
    kept = memory.room(3)
    for row in kept:
        row[:] = 7
    transfer_holds = [memory.to_fill(0) for _ in range(5)]
    for row in transfer_holds:
        row[:] = 9
    assert all((row == 7).all() for row in kept)
    memory.to_device(kept[1:], [2, 3])
    assert (pool.view(torch.uint8)[[2, 3]] == 7).all()
    memory.to_host([2], [kept[0]])
    memory.give_back(transfer_holds[0])
    assert memory.to_fill(1) is transfer_holds[0]


def test_rows_are_counted_before_there_are_more(
    layout: KVLayout, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is taken before it is written, and where it is not there none is."""
    memory = joined.memory
    memory.room(64)
    assert os.fstat(joined.file).st_blocks * 512 >= 64 * layout.block_bytes
    monkeypatch.setattr(device_rank_pool, "available_memory", lambda: 100 * layout.block_bytes)
    memory.room(95)
    size = os.fstat(joined.file).st_size
    with pytest.raises(MemoryError, match="more of the host's memory"):
        memory.room(96)
    assert os.fstat(joined.file).st_size == size
    assert not memory.lost
    monkeypatch.setattr(device_rank_pool, "available_memory", lambda: 0)
    with pytest.raises(DeviceLost, match=r"of which 0\.00 are left"):
        memory.to_fill(0)
    assert memory.lost, "the node is to end"


def test_a_rank_that_does_not_bring_its_part_is_a_lost_device(joined: Joined) -> None:
    memory = joined.memory
    row = memory.to_fill(0)
    with pytest.raises(DeviceLost, match="IndexError"):
        memory.landed(99, row)
    with pytest.raises(DeviceLost):
        memory.to_send(0)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
async def test_nodes_of_different_degree_ship_to_each_other(path: Path, first: int, second: int) -> None:
    await expect_shipped_and_reused(path, first, second, pools_apart=True)


async def test_so_do_latents_which_every_rank_has(tmp_path: Path) -> None:
    saved(tmp_path, "DeepseekV3Config", num_attention_heads=4, **DEEPSEEK_GROUPS)
    await expect_shipped_and_reused(tmp_path, 2, 1, pools_apart=True)


async def test_what_left_the_pools_is_read_back_from_the_hosts_memory(path: Path) -> None:
    async with tiered(path, kv_host_gib=0.01) as router:
        tokens = prompt(100)
        made, _ = await answer(router, "a", tokens)
        for seed in range(1, 5):
            await until(lambda seed=seed: count("host", router.prefill, "written") == 12 * seed)  # type: ignore[misc]
            await answer(router, f"other-{seed}", prompt(100, seed))
        await until(lambda: count("host", router.prefill, "written") == 12 * 5)
        again, reuse = await answer(router, "b", tokens)
        assert count("host", router.prefill, "read") >= 12
        assert (reuse.reused_prefill, again) == (96, made)
        expect_likeliest(path, tokens, made)
        await router.prefill.settle()
        await router.decode.settle()


@asynccontextmanager
async def tiered(path: Path, **kept: Any) -> AsyncIterator[Router]:
    ours = await asyncio.to_thread(assembled, path, 2, pools_apart=True, kv_blocks=24)
    theirs = await asyncio.to_thread(assembled, path, 1)
    async with (
        worker("prefill", ours, **kept) as prefill,
        worker("decode", theirs) as decode,
        routed(prefill, decode) as router,
    ):
        yield router


async def test_a_rank_that_dies_takes_its_node_with_it(path: Path) -> None:
    async with two_ranks(path, pools_apart=True) as (router, other):
        assert router.decode.loaded.parts.apart is not None
        await router.generate(make_job("a", prompt(100), 100))
        await until(lambda: router.tokens("a"))
        other.kill()
        assert await until(lambda: router.decode.loaded.fault) < 1.0
        late = "the engine thread ended: the 2 ranks can no longer compute together"
        assert (router.decode.loaded.fault or "").startswith(("rank 1 ended (signal 9)", late))
        await asyncio.wait_for(asyncio.shield(router.decode.run), 5.0)
        assert not router.failed


async def test_a_copy_that_fails_takes_the_node_with_it(path: Path) -> None:
    """The link goes on where what it calls raises: it would take in blocks that reach no pool."""
    async with two_ranks(path, pools_apart=True) as (router, _):
        memory = router.decode.loaded.parts.apart
        assert memory is not None
        row = memory.room(1)[0]
        with pytest.raises(DeviceLost):
            memory.landed(10**6, row)
        await until(lambda: router.decode.loaded.fault)
        assert "IndexError" in (router.decode.loaded.fault or "")
        await asyncio.wait_for(asyncio.shield(router.decode.run), 5.0)


async def test_a_node_of_ranks_tells_of_the_whole_of_its_blocks(path: Path) -> None:
    parts = await asyncio.to_thread(assembled, path, 2, pools_apart=True)
    async with worker("decode", parts) as node:
        assert node.loaded.lease().block_bytes == parts.layout.block_bytes == 2 * parts.kv[0].nbytes
        assert len(others(node)) == 1
    assert parts.fingerprint == assembled(path, 1).fingerprint


def test_the_rank_with_least_memory_decides_how_many_blocks_there_are(path: Path) -> None:
    parts = assembled(path, 2, pools_apart=True)
    assert isinstance(parts.ranks, DeviceRanks)
    block = parts.layout.block_bytes
    parts.ranks._available = [10 * block]
    assert parts.ranks.available(parts.layout, 0) == 20 * block, "it has half of each"
    assert parts.ranks.available(parts.layout, block) == pytest.approx(10 * block * 2 / 1.5), "and room for drafts"
    parts.ranks.close()


def test_a_rank_connects_once_all_have_loaded_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are slow to load are not waited for with a deadline."""
    connected = []
    monkeypatch.setattr(DeviceGroup, "connect", lambda self: connected.append(self.rank))
    monkeypatch.setattr(rank, "_live", lambda *_: None)
    monkeypatch.setattr(rank, "_decoder", lambda *_: None)
    monkeypatch.setattr(rank, "set_up_log", lambda *_: None)
    descriptors, lines, moves = (*make_memory(3), os.memfd_create("meeting")), RankZeroChannels(1), RankZeroChannels(1)
    line, moved = (RankChannel(os.dup(each.descriptor(0))) for each in (lines, moves))
    for each in (lines, moves):
        each.close_inherited()
    lines.broadcast(pickle.dumps(WorkerSettings(tensor_parallel_size=3, device="cpu", pools_apart=True)))
    with ThreadPoolExecutor(1) as threads:
        computing = threads.submit(rank.compute, 1, line, *descriptors[:2], moved, descriptors[2])
        assert pickle.loads(lines.receive(0))[0] == ""  # noqa: S301 - of its own thread
        lines.close()
        assert isinstance(computing.exception(30.0), EOFError)
    assert not connected
    moves.close()
    for descriptor in descriptors:
        os.close(descriptor)


MOVING = """
import os, sys, threading, time
from kvferry.worker.rank import _move
from kvferry.runtime.rank_channel import RankChannel
threading.Thread(target=_move, args=(RankChannel(int(sys.argv[1])), None, None), daemon=True).start()
time.sleep(600)
"""


def test_a_rank_whose_thread_of_moves_ends_by_an_error_ends() -> None:
    lines = RankZeroChannels(1)
    other = subprocess.Popen([sys.executable, "-c", MOVING, str(lines.descriptor(0))], pass_fds=[lines.descriptor(0)])
    lines.close_inherited()
    lines.broadcast(b"no message")
    assert other.wait(60.0) == 1
    lines.close()


FIRST = """
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
other.stdout.readline()
print(other.pid, flush=True)
"""
OTHER = """
import threading, time, numpy
from kvferry.worker.rank import _live
signs = numpy.zeros(2, int)
threading.Thread(target=_live, args=(signs, 1)).start()
while not signs[1]:
    time.sleep(0.01)
print("lives", flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_its_first_one_whatever_it_waits_for() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST, OTHER], stdout=subprocess.PIPE, check=True, timeout=60.0)
    other = int(ran.stdout)
    wait_for(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE, 10.0)


def test_ranks_want_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="2 needs GPUs from cuda:3 on, one per rank; this machine has 4"):
        start_ranks(WorkerSettings(tensor_parallel_size=2), torch.device("cuda:3"))
