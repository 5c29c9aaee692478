"""Rows of media that left an encode node's pool are read from its disk, over real HTTP; a disk that fails or hangs
costs no more than encoding."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.protocol.hashing import root_hash
from kvferry.protocol.media import Encoded, MediaItem
from kvferry.protocol.wire import unpack
from kvferry.worker import embedding_tiers
from tests.encode_worker.test_encode_service import asking
from tests.toy import FINGERPRINT
from tests.toy_media import ToySource, picture, rows_of, with_encoder
from tests.waiting import until
from tests.worker.tiered import count, reads
from tests.worker_pair import Worker, worker

ROOT = root_hash(FINGERPRINT, "3:cat")
CAT, DOG = picture("cat", 0, 70), picture("dog", 0, 9)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no read late."""
    monkeypatch.setattr(embedding_tiers, "MIN_S", 30.0)


@contextlib.asynccontextmanager
async def encoder(path: Path, source: ToySource) -> AsyncIterator[Worker]:
    kept: dict[str, Any] = {"kv_disk_path": str(path), "kv_disk_gib": 1.0}
    async with worker("encode", with_encoder(source), node_id="seer", **kept) as node:
        yield node
        await node.settle()


def run(node: Worker, item: MediaItem) -> list[bytes]:
    return node.service.endpoints.embeddings.blocks.hashes(ROOT, item)  # type: ignore[no-any-return]


async def encoded(node: Worker, *items: MediaItem) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        answer = await client.post(f"{node.node.address.url}/attempts/encode", content=asking(items, ROOT, 60.0))
    found = unpack(answer.content)
    assert isinstance(found, Encoded)
    return found.computed


async def on_disk(node: Worker, *items: MediaItem) -> None:
    tier = node.loaded._tiers.disk
    await until(lambda: all(tier.run(run(node, item)) == len(run(node, item)) for item in items))


def damage(path: Path) -> None:
    """Change a byte of each file with blocks."""
    files = [each for each in path.rglob("*") if each.is_file() and each.stat().st_size > 500]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)


async def rows_in_pool(node: Worker, item: MediaItem) -> bool:
    found: asyncio.Future[Any] = (loop := asyncio.get_running_loop()).create_future()
    blocks = node.service.endpoints.embeddings.blocks

    def load(engine: Any) -> None:
        rows = blocks.load(run(node, item), item.length)
        loop.call_soon_threadsafe(found.set_result, rows)

    node.loaded.engine.submit(load)
    rows = await found
    return rows is not None and bool((rows == rows_of(item)).all())


async def test_a_restarted_node_reads_what_the_one_before_it_encoded(tmp_path: Path) -> None:
    async with encoder(tmp_path, ToySource()) as node:
        assert await encoded(node, CAT, DOG) == 2
        await on_disk(node, CAT, DOG)
    source = ToySource()
    async with encoder(tmp_path, source) as node:
        assert await encoded(node, CAT, DOG) == 0
        assert source.made == []
        assert await rows_in_pool(node, CAT)
        assert await rows_in_pool(node, DOG)
        assert reads("disk", node, "done") == 2
        assert count("disk", node, "read") == len([*run(node, CAT), *run(node, DOG)])
        assert await encoded(node, CAT) == 0
        assert reads("disk", node, "done") == 2, "they are in the pool again"


async def test_requests_for_the_same_rows_share_a_read(tmp_path: Path) -> None:
    async with encoder(tmp_path, ToySource()) as node:
        await encoded(node, CAT)
        await on_disk(node, CAT)
    async with encoder(tmp_path, ToySource()) as node:
        assert await asyncio.gather(*(encoded(node, CAT) for _ in range(4))) == [0] * 4
        assert reads("disk", node, "done") == 1


async def test_a_damaged_file_costs_an_encoding(tmp_path: Path) -> None:
    async with encoder(tmp_path, ToySource()) as node:
        await encoded(node, CAT)
        await on_disk(node, CAT)
    damage(tmp_path)
    source = ToySource()
    async with encoder(tmp_path, source) as node:
        assert await encoded(node, CAT) == 1
        assert source.made == ["cat"]
        assert await rows_in_pool(node, CAT)


async def test_a_disk_that_hangs_costs_its_limit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with encoder(tmp_path, ToySource()) as node:
        await encoded(node, CAT, DOG)
        await on_disk(node, CAT, DOG)
    monkeypatch.setattr(embedding_tiers, "MIN_S", 0.1)
    source, goes_on = ToySource(), threading.Event()
    async with encoder(tmp_path, source) as node:
        tier = node.loaded._tiers.disk
        read = tier._store.get
        monkeypatch.setattr(tier._store, "get", lambda *asked: (goes_on.wait(30.0), read(*asked))[1])
        assert await encoded(node, CAT) == 1
        assert await encoded(node, DOG) == 1, "it is not asked meanwhile"
        assert reads("disk", node, "late") == 1
        goes_on.set()
        await until(lambda: not tier._pace.hangs and count("disk", node, "read") > 0)
        assert await rows_in_pool(node, CAT)


async def test_a_slower_disk_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with encoder(tmp_path, ToySource()) as node:
        await encoded(node, CAT)
        await on_disk(node, CAT)
    async with encoder(tmp_path, ToySource()) as node:
        monkeypatch.setattr(node.loaded._tiers.disk, "seconds", lambda blocks: 5.0)
        for _ in range(2):
            node.loaded._rates.encoded(1000, 1.0)
        assert await encoded(node, CAT) == 1
