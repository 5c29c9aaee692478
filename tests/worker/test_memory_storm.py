"""Pools, disks, a shared store, fetches and copies at once, with slow and broken calls, cancels and retractions by a
fixed seed: every token is the model's, every block comes back, and the index ends as pools and disks are."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster_state.index import on_tier
from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.kv_transfer.tiers import files, remote
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.protocol.index_rows import key_and_tag
from kvferry.protocol.messages import Holder
from kvferry.worker import block_fetches, fetch_client, local_writes, tiers
from tests.toy import VOCAB, expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, routed, worker

LANES, EACH = 5, 40
"""Clients at once, and requests of each."""
TROUBLES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENOTCONN)


class Storm:
    """`faulty` while calls of the disks and of the store may be slow or fail."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.rng, self.faulty, self.count = random.Random(seed), threading.Event(), 0
        self._luck, self._lock = random.Random(seed + 1), threading.Lock()
        for home, name in ((files, "read"), (files, "write"), (files.Folder, "remove")):
            patch.setattr(home, name, self._on_disk(getattr(home, name)))
        for name in ("age", "get", "put", "delete"):
            patch.setattr(Objects, name, self._in_store(getattr(Objects, name)))

    def _draw(self) -> float:
        with self._lock:
            return self._luck.random() if self.faulty.is_set() else 1.0

    def _on_disk(self, really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*what: Any) -> Any:
            luck = self._draw()
            if luck < 0.2:
                raise OSError(TROUBLES[int(luck * 20)], "trouble")
            time.sleep(0.05 * (luck < 0.4))
            return really(*what)

        return call

    def _in_store(self, really: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*what: Any) -> Any:
            luck = self._draw()
            if luck < 0.2:
                raise OSError("away")
            await asyncio.sleep(0.05 * (luck < 0.4))
            return await really(*what)

        return call

    async def client(self, router: Router) -> None:
        for _ in range(EACH):
            self.count += 1
            await self._request(router, f"r{self.count}")
            self.faulty.set() if self.rng.random() < 0.6 else self.faulty.clear()
            if self.rng.random() < 0.2:
                self._retract(self.rng.choice((router.prefill, router.decode)))

    def _retract(self, node: Worker) -> None:
        wrong = self.rng.sample(range(48), 2)
        node.loaded.engine.submit(lambda engine: engine.pool.forget(wrong))

    async def _request(self, router: Router, name: str) -> None:
        draw, end = self.rng.random, self.rng.randrange(4)
        ids = random.Random(self.rng.randrange(6)).choices(range(VOCAB), k=32)
        ids += random.Random(100 + end).choices(range(VOCAB), k=self.rng.choice((6, 14, 40)))
        decodes, cancels = draw() < 0.15, draw() < 0.25
        job = make_job(name, ids, self.rng.choice((1, 20)) if decodes else 1)
        if draw() < 0.6:
            holder = router.prefill if decodes else router.decode
            job = replace(job, holder=Holder(holder.target, self.rng.randrange(1, len(ids) // 4 + 1)))
        answer = None if decodes else router.post_prefill(job)
        if decodes:
            await router.generate(job)
        if cancels:
            await asyncio.sleep(0.05 * draw())
            if answer is not None and draw() < 0.3:
                await answer.hang_up()
                return
            await router.cancel(job)
        if answer is None:
            failed = lambda: any(each.request_id == name for each in router.failed)  # noqa: E731
            await until(lambda: router.finished(name) or failed())
            tokens = router.tokens(name)
        else:
            tokens = [each for told in await answer.ended() if hasattr(told, "delta") for each in told.delta.token_ids]
        assert tokens == expected(ids, len(tokens))


@pytest.mark.parametrize("seed", [2, 3])
async def test_whatever_befalls_memory_no_token_is_wrong_and_nothing_is_left(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm, store = Storm(seed, monkeypatch), MemoryStore()
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: float(tokens))  # all is worth a read
    for module, name, value in (
        *(
            (tiers, "MIN_S", 0.2),
            (fetch_client, "MIN_S", 0.2),
            (block_fetches, "BACKOFF_S", 0.1),
            (remote, "OUTAGE_S", 0.1),
        ),
        *((local_writes, "GATHERING_S", 0.1), (files, "MAX_BLOCKS", 4)),
    ):
        monkeypatch.setattr(module, name, value)
    kept: dict[str, Any] = {
        "kv_disk_path": str(tmp_path / "disk"),
        "kv_disk_gib": 0.001,
        "kv_remote_url": f"file://{tmp_path}/shared",
    }
    async with (
        worker("prefill", make_engine(48), store=store, node_id="p", **kept) as prefill,
        worker("decode", make_engine(64), store=store, node_id="d", **kept) as decode,
        routed(prefill, decode) as router,
    ):
        await asyncio.gather(*(storm.client(router) for _ in range(LANES)))
        storm.faulty.clear()
        for node, name in ((prefill, "p"), (decode, "d")):
            await node.settle()
            await until(lambda node=node, name=name: told(store, name) == here(node))  # type: ignore[misc]


def here(node: Worker) -> list[set[Any]]:
    """Rows of its pool and of its disk."""
    disk = node.loaded._tiers.disk
    assert disk is not None
    return [{key_and_tag(row) for row in rows} for rows in (node.engine.pool.changes.rows(), disk.rows())]


def told(store: MemoryStore, name: str) -> list[set[Any]]:
    """The same, as the index has them."""
    names = (name, on_tier(name, "disk"))
    return [{(key, tag) for key, found in store._rows.items() for of, tag in found if of == each} for each in names]
