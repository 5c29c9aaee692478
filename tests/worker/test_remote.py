"""What a node computed, others read from the store that they share, over real HTTP and UCX; and what befalls the store
costs no more than computing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state import index, memory_store
from kvferry.engine.block_interfaces import GRANT
from kvferry.engine.engine import Engine
from kvferry.engine.replication import Replicas
from kvferry.kv_transfer.tiers import object_groups, remote
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.messages import Holder
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import tiers
from kvferry.worker.tier_factory import open_tiers
from tests.toy import FINGERPRINT, expected, make_engine, make_job
from tests.waiting import until
from tests.worker import tiered
from tests.worker.test_fetch_client import FULL, LENGTH, prompt
from tests.worker.tiered import ask, retract, settle
from tests.worker_pair import Router, routed, worker

GROUP = 5
"""Blocks of one object: two are in the prompt."""

reads, count = partial(tiered.reads, "remote"), partial(tiered.count, "remote")


@contextlib.asynccontextmanager
async def cluster(path: Path, **settings: Any) -> AsyncIterator[Router]:
    kept = {"kv_remote_url": f"file://{path}", **settings}
    async with (
        worker("prefill", make_engine(100), **kept) as prefill,
        worker("decode", make_engine(100), **kept) as decode,
        routed(prefill, decode) as router,
    ):
        yield router


@pytest.fixture(autouse=True)
def quick_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's prompts have few blocks and take less time than any store; a busy machine makes no read late."""
    monkeypatch.setattr(object_groups, "GROUP", GROUP)
    monkeypatch.setattr(tiers, "MIN_S", 30.0)
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: tokens * 1.0)


async def left_there(path: Path, seed: int = 0) -> None:
    """By a cluster that is gone."""
    async with cluster(path) as router:
        assert (await ask(router, "before", seed)).computed == LENGTH
        await until(lambda: count(router.prefill, "written") == FULL)
        await settle(router)


@contextlib.contextmanager
def hung(call: str) -> Iterator[threading.Event]:
    """The store answers no such call until the event is set."""
    go, really = threading.Event(), getattr(Objects, call)

    async def wait(self: Objects, *how: Any) -> Any:
        await asyncio.to_thread(go.wait, 20)
        return await really(self, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Objects, call, wait)
        try:
            yield go
        finally:
            go.set()


async def test_nodes_that_start_later_read_what_those_before_them_computed(tmp_path: Path) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        reuse = await ask(router, "again")
        assert (reuse.reused_prefill, reuse.computed) == (FULL * 4, LENGTH - FULL * 4)
        assert (reads(router.prefill, "done"), count(router.prefill, "read")) == (1, FULL)
        await ask(router, "here")
        assert reads(router.prefill, "done") == 1
        await settle(router)
        assert count(router.prefill, "written") == 0


async def test_routers_are_told_what_is_there_whoever_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "STORE_GROUP", GROUP)
    monkeypatch.setattr(memory_store, "STORE_GROUP", GROUP)
    hashes = list(chain(root_hash(FINGERPRINT, ""), prompt(), 4))

    async def told(router: Router, blocks: int) -> None:
        store = router.prefill.node._store
        for _ in range(200):
            found = await store.longest_prefix(hashes, {index.ON_STORE: index.STORE_EPOCH})
            if found.get(index.ON_STORE, 0) == blocks:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(found)

    async with cluster(tmp_path) as router:
        await told(router, 0)
        await ask(router, "before")
        await told(router, FULL)
        rates = router.prefill.loaded.lease().rates
        assert 0 < rates.store_block_s == pytest.approx(router.prefill.loaded._tiers.remote.block_s)
        monkeypatch.setattr(router.prefill.loaded._tiers.remote, "_unavailable_until", time.monotonic() + 9.0)
        assert router.prefill.loaded.lease().rates.store_block_s == 0
        await settle(router)
    async with cluster(tmp_path) as router:
        await told(router, 0)
        await ask(router, "again")
        await told(router, FULL)
        await settle(router)


async def test_a_chain_is_lent_once_for_all_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    really = Replicas.hold_chain

    def hold_chain(self: Replicas, transfer: int, block_ids: list[int]) -> None:
        given.append(len(block_ids))
        really(self, transfer, block_ids)

    monkeypatch.setattr(Replicas, "hold_chain", hold_chain)
    await left_there(tmp_path)
    assert given == [2 * GROUP]


async def test_what_decode_computed_is_there_too(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await router.generate(make_job("before", prompt(), 40))
        await until(lambda: router.finished("before"))
        whole = [*prompt(), *router.tokens("before")]
        groups_of_it = (len(whole) - 1) // 4 // GROUP
        await until(lambda: count(router.decode, "written") == groups_of_it * GROUP)
        await settle(router)
    async with cluster(tmp_path) as router:
        (first, *_) = await router.post_prefill(make_job("on", whole, 1)).ended()
        assert first.delta.reuse.reused_prefill == groups_of_it * GROUP * 4
        await settle(router)


async def test_the_rest_of_a_prompt_is_computed_and_shipped_as_ever(tmp_path: Path) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        asked = make_job("again", [*prompt(0), *prompt(9)], 6)
        first, shipped = await router.post_prefill(asked, router.decode.target).ended()
        assert first.delta.reuse.reused_prefill == FULL * 4
        assert shipped.blocks == 2 * LENGTH // 4
        await until(lambda: router.finished("again"))
        assert [*first.delta.token_ids, *router.tokens("again")] == expected(list(asked.token_ids), 6)
        await settle(router)


async def test_requests_that_lack_the_same_blocks_await_one_read(tmp_path: Path) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        with hung("get") as go:
            answers = [router.post_prefill(make_job(f"again-{n}", prompt(), 1)) for n in range(3)]
            await until(lambda: len(router.prefill.service.endpoints.tiers._waiting) == 3)
            await until(lambda: router.prefill.service.endpoints.tiers._in_flight)
            go.set()
            for answer in answers:
                (first, *_) = await answer.ended()
                assert first.delta.reuse.reused_prefill == FULL * 4
        assert reads(router.prefill, "done") == 1
        await settle(router)


async def test_what_a_peer_holds_comes_from_there(tmp_path: Path) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        await router.generate(make_job("before", prompt(), 1))
        await until(lambda: router.finished("before"))
        read = count(router.decode, "read")
        assert read == FULL
        await ask(router, "again", holder=Holder(router.decode.target, FULL))
        assert count(router.prefill, "read") == 0
        await settle(router)


@pytest.mark.parametrize("call", ["age", "get"])
async def test_a_store_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        if call == "get":
            monkeypatch.setattr(remote, "CALL_S", 30.0)
            monkeypatch.setattr(tiers, "SLOWNESS", 0.0)
        monkeypatch.setattr(tiers, "MIN_S", 0.1)
        with hung(call) as go:
            assert (await ask(router, "again")).computed == LENGTH
            assert reads(router.prefill, "late") == (call == "get")
            go.set()
        await settle(router)


async def test_a_store_that_is_away_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*what: Any) -> None:
        raise OSError("no route to it")

    for call in ("age", "get", "put"):
        monkeypatch.setattr(Objects, call, fail)
    async with cluster(tmp_path) as router:
        for name in ("once", "twice"):
            await ask(router, name)
        assert router.prefill.loaded.fault is None
        await until(lambda: count(router.prefill, "lost"))
        await settle(router)


def crowded_out(engine: Engine) -> None:
    """Whatever is cached leaves the pool."""
    pool = engine.pool
    taken = pool.acquire("others", GRANT, [], pool.available)
    assert taken
    pool.release("others", GRANT, taken)


async def test_what_leaves_the_pool_while_the_store_is_asked_for_more_is_not_taken_for_read(tmp_path: Path) -> None:
    """Blocks that nobody filled would be found as the prompt's."""
    async with cluster(tmp_path) as router:
        begins = make_job("begins", prompt()[: 4 * (GROUP - 2) + 1], 1)
        await router.post_prefill(begins).ended()
        with hung("age") as go:
            job = make_job("goes-on", prompt(), 1)
            answer = router.post_prefill(job)
            await until(lambda: router.prefill.service.endpoints.tiers._waiting)
            router.prefill.loaded.engine.submit(crowded_out)
            await until(lambda: not router.prefill.engine.pool.cached_blocks)
            go.set()
            (first, *_) = await answer.ended()
        assert list(first.delta.token_ids) == expected(prompt(), 1)
        assert (first.delta.reuse.computed, reads(router.prefill, "done")) == (LENGTH, 0)
        await settle(router)


async def test_a_request_that_ends_while_its_blocks_are_looked_for_or_read_leaves_nothing(tmp_path: Path) -> None:
    await left_there(tmp_path)
    async with cluster(tmp_path) as router:
        for call in ("age", "get"):
            with hung(call) as go:
                job = make_job(f"again-{call}", prompt(), 1)
                answer = router.post_prefill(job)
                await until(lambda: router.prefill.service.endpoints.tiers._waiting)
                if call == "get":
                    await until(lambda: router.prefill.service.endpoints.tiers._in_flight)
                await router.cancel(job, router.prefill)
                (failed,) = await answer.ended()
                assert failed.code == "cancelled"
                go.set()
            await settle(router)
        assert router.prefill.engine.request_table.waiting_tokens == 0
        assert (await ask(router, "later")).reused_prefill == FULL * 4


async def test_where_computing_is_quicker_nothing_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_there(tmp_path)
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: 0.0)
    async with cluster(tmp_path) as router:
        with hung("age"):
            assert (await ask(router, "again")).computed == LENGTH
        await settle(router)


async def test_what_was_said_to_be_wrong_is_there_no_more(tmp_path: Path) -> None:
    async with cluster(tmp_path) as router:
        await ask(router, "before")
        await until(lambda: count(router.prefill, "written") == FULL)
        retract(router.prefill, 100)
        await until(lambda: not list(tmp_path.glob("*/*.kv")))
        assert (await ask(router, "again")).computed == LENGTH
        await settle(router)


async def test_a_disk_is_read_before_it(tmp_path: Path) -> None:
    kept = {"kv_disk_path": str(tmp_path / "disk")}
    async with cluster(tmp_path / "shared", **kept) as router:
        await ask(router, "before")
        written = router.prefill.node.metrics.tiers.blocks["disk"]["written"]._value
        await until(lambda: count(router.prefill, "written") == written.get() == FULL)
        await settle(router)
    async with cluster(tmp_path / "shared", **kept) as router:
        assert (await ask(router, "again")).reused_prefill == FULL * 4
        assert count(router.prefill, "read") == 0
        await settle(router)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"enable_prefix_caching": False}, "the prefix cache is off"), ({"kv_remote_url": "ftp://host"}, "is not one of")],
)
async def test_what_cannot_be_kept_is_refused_at_the_start(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    async with worker("prefill", make_engine()) as node:
        wanted = WorkerSettings(**{"role": "prefill", "kv_remote_url": f"file://{tmp_path}", **settings})
        with pytest.raises(ConfigError, match=why) as raised:
            open_tiers(wanted, node.loaded.parts)
        assert raised.value.param == "kv_remote_url"
