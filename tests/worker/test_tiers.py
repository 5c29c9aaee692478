"""What leaves a node's pool is read from its disk, over real HTTP and UCX, and what befalls the disk costs no more than
computing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state.index import on_tier
from kvferry.kv_transfer.tiers import files
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.messages import Holder
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import fetch_client, local_writes, tiers
from kvferry.worker.tier_factory import open_tiers
from tests.toy import FINGERPRINT, expected, make_engine, make_job
from tests.waiting import until
from tests.worker import tiered
from tests.worker.test_fetch_client import FULL, LENGTH, prompt
from tests.worker.tiered import ask, evict_the_oldest, in_pool, retract, settle
from tests.worker_pair import Router, Worker, routed, worker

POOL = 40
"""Blocks: three prompts fill it, with what a read must leave available."""

reads, count = partial(tiered.reads, "disk"), partial(tiered.count, "disk")


@contextlib.asynccontextmanager
async def cluster(path: Path, blocks: int = POOL) -> AsyncIterator[Router]:
    """A decode node without a disk, and a prefill node that keeps its blocks there."""
    kept: dict[str, Any] = {"kv_disk_path": str(path), "kv_disk_gib": 1.0}
    async with (
        worker("prefill", make_engine(blocks), **kept) as prefill,
        worker("decode", make_engine(100)) as decode,
        routed(prefill, decode) as router,
    ):
        yield router


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no read late, and evicts in the same order."""
    monkeypatch.setattr(tiers, "MIN_S", 30.0)
    evict_the_oldest(monkeypatch)


@pytest.fixture(autouse=True)
def slow_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's prompts take less time than any disk."""
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: tokens * 1.0)


def tier_of(node: Worker) -> Any:
    return node.loaded._tiers.disk


async def fill(router: Router, first: int = 1, prompts: int = 5) -> None:
    """Other prompts push those before them out of the pool."""
    for seed in range(first, first + prompts):
        before = count(router.prefill, "written")
        await ask(router, f"other-{seed}", seed)
        await until(lambda before=before: count(router.prefill, "written") == before + FULL)  # type: ignore[misc]


async def evicted(router: Router) -> None:
    """The first prompt was computed, written, and has left the pool."""
    await ask(router, "before", 0)
    await until(lambda: count(router.prefill, "written") == FULL)
    await fill(router)
    more = 20
    while in_pool(router.prefill) and more < 40:  # a block leaves later whose copy was under way
        await fill(router, more := more + 1, 1)
    assert count(router.prefill, "read") == 0


async def test_a_prompt_that_left_the_pool_is_read_and_not_computed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        reuse = await ask(router, "again", 0)
        assert (reuse.reused_prefill, reuse.computed) == (FULL * 4, LENGTH - FULL * 4)
        assert (reads(router.prefill, "done"), count(router.prefill, "read")) == (1, FULL)
        await ask(router, "here", 0)
        assert reads(router.prefill, "done") == 1
        await settle(router)


async def test_a_restart_finds_what_the_one_before_it_computed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await ask(router, "before", 0)
        await until(lambda: count(router.prefill, "written") == FULL)
    async with cluster(tmp_path) as router:
        assert len(tier_of(router.prefill).hashes()) == FULL
        assert (await ask(router, "again", 0)).reused_prefill == FULL * 4
        await settle(router)


async def test_the_rest_of_a_prompt_is_shipped_as_ever(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        asked = make_job("again", [*prompt(0), *prompt(9)], 6)
        first, shipped = await router.post_prefill(asked, router.decode.target).ended()
        assert first.delta.reuse.reused_prefill == FULL * 4
        assert shipped.blocks == 2 * LENGTH // 4
        await until(lambda: router.finished("again"))
        assert [*first.delta.token_ids, *router.tokens("again")] == expected(list(asked.token_ids), 6)
        await settle(router)


async def test_requests_that_lack_the_same_blocks_await_one_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        with hung(router.prefill) as go:
            answers = [router.post_prefill(make_job(f"again-{n}", prompt(0), 1)) for n in range(3)]
            await until(lambda: len(router.prefill.service.endpoints.tiers._waiting) == 3)
            go.set()
            for answer in answers:
                (first, *_) = await answer.ended()
                assert first.delta.reuse.reused_prefill == FULL * 4
        assert reads(router.prefill, "done") == 1
        await settle(router)


@contextlib.contextmanager
def hung(node: Worker) -> Iterator[threading.Event]:
    """Its disk answers no read until the event is set."""
    go, really = threading.Event(), files.read

    def read(*how: Any) -> None:
        go.wait(20)
        really(*how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "read", read)
        try:
            yield go
        finally:
            go.set()


async def test_a_disk_that_hangs_is_not_waited_for_and_not_asked_again_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        monkeypatch.setattr(tiers, "MIN_S", 0.05)
        monkeypatch.setattr(tiers, "SLOWNESS", 0.0)
        with hung(router.prefill) as go:
            assert (await ask(router, "again", 0)).computed == LENGTH
            assert reads(router.prefill, "late") == 1
            others = [await ask(router, f"another-{seed}", seed) for seed in range(1, 6)]
            assert LENGTH in [each.computed for each in others]  # whichever of them have left the pool, too
            assert reads(router.prefill, "late") == 1
            go.set()
        await settle(router)
        monkeypatch.setattr(tiers, "MIN_S", 30.0)
        await fill(router, 10)
        assert (await ask(router, "read", 0)).reused_prefill == FULL * 4
        await settle(router)


async def test_a_file_that_is_wrong_is_computed_again_and_announced_no_more(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        for path in tier_of(router.prefill).directory.glob("*.kv"):
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        told: list[Any] = []
        tier_of(router.prefill).changed = lambda stored, removed: told.extend(removed)
        assert (await ask(router, "again", 0)).computed == LENGTH
        assert (reads(router.prefill, "failed"), len(told)) == (1, FULL)
        await settle(router)


async def test_a_request_that_ends_while_its_blocks_are_read_leaves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        with hung(router.prefill) as go:
            job = make_job("again", prompt(0), 1)
            answer = router.post_prefill(job)
            await until(lambda: router.prefill.service.endpoints.tiers._waiting)
            await router.cancel(job, router.prefill)
            (failed,) = await answer.ended()
            assert failed.code == "cancelled"
            go.set()
        await settle(router)
        assert router.prefill.engine.request_table.waiting_tokens == 0
        assert (await ask(router, "later", 0)).reused_prefill == FULL * 4


async def test_where_computing_is_quicker_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: 0.0)
        assert (await ask(router, "again", 0)).computed == LENGTH
        assert count(router.prefill, "read") == 0
        await settle(router)


async def test_others_are_told_what_is_in_the_pool_and_what_on_disk(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        node = router.prefill
        pool, tier, lease = node.engine.pool, tier_of(node), node.loaded.lease()
        assert lease.rates.disk_block_s == pytest.approx(tier.block_s)
        assert router.decode.loaded.lease().rates.disk_block_s == 0
        name, store = lease.node_id, node.node._store
        names = {name: lease.epoch, on_tier(name, "disk"): lease.epoch}
        hashes = list(chain(root_hash(FINGERPRINT, ""), prompt(0), 4))[:FULL]

        async def told(hashes: list[bytes]) -> dict[str, int]:
            return await store.longest_prefix(hashes, names)

        assert pool.evicted_total
        assert set(hashes) <= set(tier.hashes())
        until_told = 0
        while await told(hashes) != {on_tier(name, "disk"): FULL} and until_told < 200:
            until_told += 1
            await asyncio.sleep(0.05)
        assert await told(hashes) == {on_tier(name, "disk"): FULL}
        await ask(router, "again", 0)
        while await told(hashes) != {name: FULL, on_tier(name, "disk"): FULL} and until_told < 400:
            until_told += 1
            await asyncio.sleep(0.05)
        assert await told(hashes) == {name: FULL, on_tier(name, "disk"): FULL}
        tier.drop(hashes[:1])
        while await told(hashes) != {name: FULL} and until_told < 600:
            until_told += 1
            await asyncio.sleep(0.05)
        assert await told(hashes) == {name: FULL}
        await settle(router)


async def test_what_is_retracted_is_not_read_either(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await ask(router, "before", 0)
        await until(lambda: count(router.prefill, "written") == FULL)
        retract(router.prefill, POOL)
        await until(lambda: not tier_of(router.prefill).hashes())
        assert (await ask(router, "again", 0)).computed == LENGTH
        await settle(router)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"enable_prefix_caching": False}, "the prefix cache is off"),
        ({"kv_disk_path": "/proc/nowhere"}, "cannot keep blocks"),
    ],
)
async def test_what_cannot_be_kept_is_refused_at_the_start(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    async with worker("prefill", make_engine()) as node:
        wanted = WorkerSettings(**{"role": "prefill", "kv_disk_path": str(tmp_path), **settings})
        with pytest.raises(ConfigError, match=why) as raised:
            open_tiers(wanted, node.loaded.parts)
        assert raised.value.param == "kv_disk_path"
        assert open_tiers(WorkerSettings(role="prefill"), node.loaded.parts).disk is None


async def test_few_new_blocks_are_written_when_no_more_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as router:
        (first, *_) = await router.post_prefill(make_job("short", prompt(0)[:20], 1)).ended()
        assert first.delta.reuse.computed == 20
        await until(lambda: router.prefill.service.endpoints.tiers._writes[0]._fresh)
        assert count(router.prefill, "written") == 0
        monkeypatch.setattr(local_writes, "GATHERING_S", 0.0)
        await until(lambda: count(router.prefill, "written") == 5)
        assert not router.prefill.service.endpoints.tiers._writes[0]._fresh
        await settle(router)


async def test_a_disk_that_takes_nothing_holds_half_of_the_pool_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a network's file system that hangs would stop the node."""
    go, really = threading.Event(), files.write

    def write(*how: Any) -> Any:
        go.wait(20)
        return really(*how)

    monkeypatch.setattr(files, "write", write)
    async with cluster(tmp_path) as router:
        writes = router.prefill.service.endpoints.tiers._writes[0]
        for seed in range(6):
            assert (await ask(router, f"ask-{seed}", seed)).computed == LENGTH
            await until(lambda: writes._held or seed)  # noqa: B023
        await until(lambda: writes._held == POOL // local_writes.HELD)
        assert router.prefill.engine.pool.available >= POOL // 2
        assert count(router.prefill, "lost") > FULL
        go.set()
        await until(lambda: not writes._fresh and not writes._held)
        assert count(router.prefill, "written") + count(router.prefill, "lost") == 6 * FULL
        await settle(router)


async def test_what_is_not_on_disk_comes_from_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_client, "MIN_S", 30.0)
    longer = [*prompt(0), *prompt(9)]
    async with cluster(tmp_path, 50) as router:
        await router.generate(make_job("held", longer, 1))
        await until(lambda: router.finished("held"))
        await evicted(router)
        asked = replace(make_job("again", longer, 1), holder=Holder(router.decode.target, len(longer) // 4))
        (first, *_) = await router.post_prefill(asked).ended()
        assert list(first.delta.token_ids) == expected(longer, 1)
        assert first.delta.reuse.balanced
        assert (first.delta.reuse.reused_prefill, first.delta.reuse.computed) == (FULL * 4, len(longer) % 4 or 4)
        assert first.delta.reuse.fetched == len(longer) - FULL * 4 - first.delta.reuse.computed
        await settle(router)


async def test_what_is_retracted_while_it_is_read_is_not_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await evicted(router)
        pool = router.prefill.engine.pool
        with hung(router.prefill) as go:
            answer = router.post_prefill(make_job("again", prompt(0), 1))
            await until(lambda: router.prefill.service.endpoints.tiers._in_flight)
            wrong = next(iter(router.prefill.service.endpoints.tiers._in_flight))
            pool.miss_reasons.note([wrong], "retracted")
            go.set()
            (first, *_) = await answer.ended()
            assert first.delta.reuse.computed == LENGTH
        assert reads(router.prefill, "failed") == 1
        await settle(router)


async def test_of_a_prompt_that_fills_the_pool_the_beginning_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_writes, "GATHERING_S", 0.0)
    async with cluster(tmp_path, FULL + FULL // 2) as router:
        await ask(router, "long", 0)
        half = (FULL + FULL // 2) // local_writes.HELD
        await until(lambda: count(router.prefill, "written") == half)
        await until(lambda: count(router.prefill, "lost") == FULL - half)
        assert tier_of(router.prefill).run(tier_of(router.prefill).hashes()) == half
        await settle(router)


async def test_what_could_not_be_written_is_tried_again_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of a chain would be kept whose beginning is not, and never be found."""

    def full(*how: Any) -> Any:
        raise OSError(5, "Input/output error")

    async with cluster(tmp_path, 100) as router:
        with monkeypatch.context() as patched:
            patched.setattr(files, "write", full)
            await ask(router, "before", 0)
            await until(lambda: count(router.prefill, "lost") == FULL)
        longer = [*prompt(0), *prompt(9)]
        (first, *_) = await router.post_prefill(make_job("longer", longer, 1)).ended()
        assert first.delta.reuse.reused_prefill == FULL * 4
        await until(lambda: count(router.prefill, "written") == len(longer) // 4)
        assert len(list(tier_of(router.prefill).directory.glob("*.kv"))) == 1
        await settle(router)


async def test_what_left_the_pool_before_it_was_written_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as router:
        with monkeypatch.context() as patched:
            patched.setattr(local_writes.LocalWrites, "_schedule", lambda self: None)
            for seed in range(4):
                await ask(router, f"ask-{seed}", seed)
        fresh = router.prefill.service.endpoints.tiers._writes[0]._fresh
        assert count(router.prefill, "lost") + len(fresh) == 4 * FULL
        assert set(fresh) <= set(router.prefill.engine.pool.findable())
        await settle(router)
