"""The pool's memory: blocks as bytes, and pages that nobody wrote to take no memory."""

from __future__ import annotations

import sys

import numpy as np
import psutil
import pytest
import torch

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import pool_memory
from kvferry.worker.pool_memory import PoolMemory, make_pool, pool_blocks

CPU = torch.device("cpu")
LAYOUT = KVLayout(2, 2, 8, "float32", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_link_sees_each_block_as_its_own_bytes(dtype: torch.dtype) -> None:
    layout = KVLayout(2, 2, 8, str(dtype).removeprefix("torch."), 4)
    kv = make_pool(layout, 3, CPU)
    memory = PoolMemory(kv)
    block = memory.block(1)
    assert isinstance(block, np.ndarray)
    assert (block.nbytes, block.flags["C_CONTIGUOUS"], block.flags["WRITEABLE"]) == (layout.block_bytes, True, True)
    block[:] = np.frombuffer(kv[0].fill_(2).view(torch.uint8).flatten().numpy().tobytes(), dtype=np.uint8)
    assert bool((kv[1] == 2).all())
    assert not kv[2].any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory as Linux counts it")
def test_only_blocks_that_were_written_take_memory() -> None:
    layout = KVLayout(2, 2, 64, "float32", 1024)
    before = psutil.Process().memory_info().rss
    kv = make_pool(layout, 2**29 // layout.block_bytes, CPU)
    assert kv.data_ptr() % 4096 == 0
    kv[0] = 1.0
    assert not kv[-1, -1, -1, -1, -1].any()
    assert psutil.Process().memory_info().rss - before < 2**27


def test_a_pool_that_the_system_refuses_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-gib"):
        make_pool(KVLayout(2, 2, 64, "float32", 1024), 2**40, CPU)


def test_pool_size_comes_from_gib_or_blocks() -> None:
    assert pool_blocks(WorkerSettings(kv_cache_gib=0.5), LAYOUT.block_bytes, CPU) == 2**29 // LAYOUT.block_bytes
    assert pool_blocks(WorkerSettings(kv_cache_gib=0.5, kv_blocks=7), LAYOUT.block_bytes, CPU) == 7


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (WorkerSettings(kv_cache_gib=1e6), "--kv-cache-gib"),
        (WorkerSettings(kv_blocks=10**12), "--kv-blocks"),
        (WorkerSettings(kv_cache_gib=1e-9), "--kv-cache-gib"),
    ],
)
def test_a_pool_that_does_not_fit_names_its_flag(settings: WorkerSettings, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        pool_blocks(settings, LAYOUT.block_bytes, CPU)


def test_memory_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "available_bytes", lambda device: 1000 * LAYOUT.block_bytes)
    assert pool_blocks(WorkerSettings(kv_blocks=950), LAYOUT.block_bytes, CPU) == 950
    with pytest.raises(ConfigError):
        pool_blocks(WorkerSettings(kv_blocks=951), LAYOUT.block_bytes, CPU)
