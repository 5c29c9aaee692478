"""Nodes whose pool is on a device keep its blocks in the host's memory, on disk and in a store, over real HTTP and UCX.
The device is a stand-in: its blocks are tensors, which are no bytes, and reached by the copies that a GPU's are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvferry.cluster_state.index import on_tier
from kvferry.engine.runner import Runner
from kvferry.kv_transfer.tiers import object_groups
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import tier_factory, tiers
from kvferry.worker.device_copies import DeviceCopies
from kvferry.worker.pool_memory import PoolMemory
from kvferry.worker.tier_factory import open_tiers
from tests.toy import FINGERPRINT, make_engine, make_job
from tests.waiting import until
from tests.worker.test_fetch_client import FULL, LENGTH, prompt
from tests.worker.tiered import ask, count, evict_the_oldest, reads, retract, settle
from tests.worker_pair import Router, routed, worker

POOL = 40
"""Blocks: three prompts fill it, with what a read must leave available."""
GIB = 1024**3


class Far(PoolMemory):
    """The pool as if it were not in the host's memory."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv)
        self._on_cpu = False


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the toy's prompts have few blocks and take less time than any copy; a busy machine makes no read late."""
    monkeypatch.setattr(tier_factory, "PoolMemory", Far)
    monkeypatch.setattr(tiers, "MIN_S", 30.0)
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: tokens * 1.0)
    monkeypatch.setattr(object_groups, "GROUP", 5)
    evict_the_oldest(monkeypatch)


@contextlib.asynccontextmanager
async def cluster(blocks: int = POOL, **kept: Any) -> AsyncIterator[Router]:
    async with (
        worker("prefill", make_engine(blocks), **kept) as prefill,
        worker("decode", make_engine(100)) as decode,
        routed(prefill, decode) as router,
    ):
        yield router


async def fill(router: Router, tier: str, first: int = 1, prompts: int = 5) -> None:
    """Other prompts push those before them out of the pool."""
    for seed in range(first, first + prompts):
        before = count(tier, router.prefill, "written")
        await ask(router, f"other-{first}-{seed}", seed)
        await until(lambda before=before: count(tier, router.prefill, "written") == before + FULL)  # type: ignore[misc]


async def evicted(router: Router, tier: str) -> None:
    await fill(router, tier, 0, 1)
    await fill(router, tier)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_what_left_the_pool_is_copied_back_and_not_computed(tmp_path: Path, tier: str) -> None:
    kept: dict[str, dict[str, Any]] = {"host": {"kv_host_gib": 0.1}, "disk": {"kv_disk_path": str(tmp_path)}}
    async with cluster(**kept[tier]) as router:
        await evicted(router, tier)
        assert count(tier, router.prefill, "read") == 0
        reuse = await ask(router, "again", 0)
        assert (reuse.reused_prefill, reuse.computed) == (FULL * 4, LENGTH - FULL * 4)
        assert reads(tier, router.prefill, "done") == 1
        assert 0 < count(tier, router.prefill, "read") <= FULL, "what the pool lacked"
        asked = make_job("on", [*prompt(0), *prompt(9)], 6)
        (first, _) = await router.post_prefill(asked, router.decode.target).ended()
        assert first.delta.reuse.reused_prefill == FULL * 4
        await until(lambda: router.finished("on"))
        await settle(router)


async def test_the_hosts_memory_is_asked_before_the_disk_which_has_what_it_has_no_more(tmp_path: Path) -> None:
    block_bytes = cast(Runner, make_engine(1).runner).kv[0].nbytes
    host = 4.5 * FULL * block_bytes / GIB
    async with cluster(kv_host_gib=host, kv_disk_path=str(tmp_path)) as router:
        await evicted(router, "disk")
        await until(lambda: count("host", router.prefill, "written") == 6 * FULL)
        assert (await ask(router, "late", 2)).reused_prefill == FULL * 4
        node = router.prefill
        of_host = count("host", node, "read")
        assert (of_host > 0, count("disk", node, "read")) == (True, 0)
        assert (await ask(router, "early", 0)).reused_prefill == FULL * 4
        assert count("host", node, "read") == of_host
        assert 0 < count("disk", node, "read") <= FULL, "what the pool lacked"
        await settle(router)
        node.loaded.set_gauges()
        tier_bytes = node.node.metrics.tiers.bytes
        assert 0 < tier_bytes["host"]._value.get() <= host * GIB
        assert tier_bytes["disk"]._value.get() > 6 * FULL * block_bytes


async def test_others_are_told_what_is_in_the_hosts_memory() -> None:
    async with cluster(kv_host_gib=0.1) as router:
        await evicted(router, "host")
        lease, store = router.prefill.loaded.lease(), router.prefill.node._store
        assert lease.rates.host_block_s == pytest.approx(router.prefill.loaded._tiers.host.block_s)
        assert (lease.rates.disk_block_s, lease.rates.store_block_s) == (0, 0)
        hashes = list(chain(root_hash(FINGERPRINT, ""), prompt(0), 4))[:FULL]
        name = on_tier(lease.node_id, "host")

        async def told() -> bool:
            return await store.longest_prefix(hashes, {name: lease.epoch}) == {name: FULL}

        await eventually(told)
        await settle(router)


async def eventually(held: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(200):
        if await held():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come")


async def test_what_a_node_on_a_device_left_in_a_store_another_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"kv_remote_url": f"file://{tmp_path}"}
    async with cluster(100, **kept) as router:
        assert (await ask(router, "before")).computed == LENGTH
        await until(lambda: count("remote", router.prefill, "written") == FULL)
        await settle(router)
    async with cluster(100, **kept) as router:
        assert (await ask(router, "again")).reused_prefill == FULL * 4
        assert count("remote", router.prefill, "read") == FULL
        await settle(router)
    monkeypatch.setattr(tier_factory, "PoolMemory", PoolMemory)
    async with cluster(100, **kept) as router:
        assert (await ask(router, "on a CPU")).reused_prefill == FULL * 4
        await settle(router)


async def test_what_is_retracted_leaves_the_hosts_memory_too() -> None:
    async with cluster(kv_host_gib=0.1) as router:
        await fill(router, "host", 0, 1)
        tier = router.prefill.loaded._tiers.host
        assert len(tier.hashes()) == FULL
        retract(router.prefill, POOL)
        await until(lambda: not tier.hashes())
        assert (await ask(router, "again", 0)).computed == LENGTH
        await settle(router)


async def test_host_memory_that_cannot_be_used_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker("prefill", make_engine()) as node:
        parts = node.loaded.parts

        def refused(gib: float, **settings: Any) -> str:
            with pytest.raises(ConfigError) as raised:
                open_tiers(WorkerSettings(role="prefill", kv_host_gib=gib, **settings), parts)
            assert raised.value.param == "kv_host_gib"
            return str(raised.value)

        assert "the prefix cache is off" in refused(1.0, enable_prefix_caching=False)
        assert "host memory left" in refused(1e6)
        assert "no room for a block" in refused(1e-9)
        monkeypatch.setattr(tier_factory, "PoolMemory", PoolMemory)
        assert "raise --kv-cache-gib" in refused(1.0)


def test_copies_move_blocks_both_ways() -> None:
    pool = torch.arange(12, dtype=torch.uint8).repeat_interleave(8).view(12, 8)
    copies = DeviceCopies(pool.device, 8)
    rows = copies.room(3)
    copies.to_host([pool[4], pool[7], pool[2]], rows)
    assert [row.tolist() for row in rows] == [[4] * 8, [7] * 8, [2] * 8]
    copies.to_device(rows[:2], [pool[0], pool[1]])
    assert pool[:3, 0].tolist() == [4, 7, 2]
    with pytest.raises(MemoryError):
        copies.room(1 << 60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copies_of_a_gpu_go_beside_its_steps() -> None:
    pool = torch.arange(12, dtype=torch.uint8, device="cuda").repeat_interleave(1 << 20).view(12, 1 << 20)
    torch.cuda.synchronize()
    copies = DeviceCopies(pool.device, 1 << 20)
    rows = copies.room(3)
    assert torch.from_numpy(rows[0]).is_pinned()
    copies.to_host([pool[4], pool[7], pool[2]], rows)
    assert [row.max() for row in rows] == [4, 7, 2]
    copies.to_device(rows[:2], [pool[0], pool[1]])
    assert pool[:3].amax(1).tolist() == [4, 7, 2]
