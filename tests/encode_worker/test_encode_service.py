"""An encode node over real HTTP and UCX: rows of media are made once, kept in blocks, and fetched by a prefill node;
what befalls it costs the prefill node's own encoder, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import httpx
import pytest
import torch

from kvferry.protocol.errors import KvferryError, StepFailed
from kvferry.protocol.hashing import root_hash
from kvferry.protocol.media import Encoded, EncodeRequest, MediaItem, with_data, without_data
from kvferry.protocol.messages import DecodeTarget
from kvferry.protocol.wire import pack, unpack
from kvferry.worker import embedding_fetch
from tests.toy import FINGERPRINT
from tests.toy_media import ToySource, picture, rows_of, with_encoder
from tests.waiting import until
from tests.worker_pair import Worker, worker

ROOT = root_hash(FINGERPRINT, "3:cat")
CAT, DOG = picture("cat"), picture("dog", 5, 9)


@dataclass
class Nodes:
    encode: Worker
    prefill: Worker
    theirs: ToySource
    own: ToySource

    async def post(self, body: bytes) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=15.0) as client:
            return await client.post(f"{self.encode.node.address.url}/attempts/encode", content=body)

    async def encoded(self, *items: MediaItem, root: bytes = ROOT) -> int:
        answer = unpack((await self.post(asking(items, root))).content)
        assert isinstance(answer, Encoded)
        return answer.computed

    async def rows(
        self, *items: MediaItem, root: bytes = ROOT, encoder: DecodeTarget | None = None, limit_s: float = 10.0
    ) -> list[torch.Tensor]:
        """What the prefill node's engine gets. encoder: by default the encode node."""
        loop = asyncio.get_running_loop()
        got: asyncio.Future[Sequence[torch.Tensor] | Exception] = loop.create_future()
        source = self.prefill.service.endpoints.embeddings
        target = encoder or self.encode.target
        source.submit(root, items, lambda found: loop.call_soon_threadsafe(got.set_result, found), limit_s, target)
        found = await asyncio.wait_for(got, 15.0)
        if isinstance(found, Exception):
            raise found
        return list(found)

    def fetched(self, outcome: str = "done") -> float:
        return float(self.prefill.node.metrics.fetches.ended[outcome]._value.get())


def asking(items: Sequence[MediaItem], root: bytes = ROOT, deadline_s: float = 10.0) -> bytes:
    return b"".join(with_data(pack(EncodeRequest(root, without_data(items), deadline_s)), items))


def same(found: Sequence[torch.Tensor], *items: MediaItem) -> bool:
    return all(torch.equal(rows, rows_of(item)) for rows, item in zip(found, items, strict=True))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no fetch late."""
    monkeypatch.setattr(embedding_fetch, "MIN_S", 10.0)


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    theirs, own = ToySource(), ToySource()
    async with worker("encode", with_encoder(theirs)) as encode, worker("prefill", with_encoder(own)) as prefill:
        yield Nodes(encode, prefill, theirs, own)
        for source in (theirs, own):
            source.go.set()
        await encode.settle()
        await prefill.settle()


async def test_rows_are_made_once_and_fetched(nodes: Nodes) -> None:
    assert await nodes.encoded(CAT, DOG) == 2
    assert await nodes.encoded(DOG, CAT) == 0
    assert same(await nodes.rows(CAT, DOG), CAT, DOG)
    assert (nodes.theirs.made, nodes.own.made, nodes.fetched()) == (["cat", "dog"], [], 2)
    assert same(await nodes.rows(DOG, CAT), DOG, CAT)
    assert nodes.fetched() == 2, "they are in its own blocks now"
    lease = nodes.encode.loaded.lease()
    assert (lease.role, lease.media_row_bytes) == ("encode", 12)


async def test_tenants_share_no_rows(nodes: Nodes) -> None:
    other = root_hash(FINGERPRINT, "3:dog")
    await nodes.encoded(CAT)
    assert same(await nodes.rows(CAT, root=other), CAT)
    assert (nodes.own.made, nodes.fetched("lacking")) == (["cat"], 1)
    assert await nodes.encoded(CAT, root=other) == 1


async def test_requests_for_the_same_rows_share_a_fetch(nodes: Nodes) -> None:
    await nodes.encoded(CAT)
    with nodes.encode.frozen_engine():
        both = [asyncio.create_task(nodes.rows(CAT)) for _ in range(2)]
        source = nodes.prefill.service.endpoints.embeddings
        await until(lambda: [len(fetch.waiting) for fetch in source._open.values()] == [2])
    assert all([same(await rows, CAT) for rows in both])
    assert nodes.fetched() == 1


async def test_a_cancelled_request_ends_its_fetch(nodes: Nodes) -> None:
    await nodes.encoded(CAT)
    source = nodes.prefill.service.endpoints.embeddings
    told: list[object] = []
    with nodes.encode.frozen_engine():
        cancel = source.submit(ROOT, [CAT], told.append, 10.0, nodes.encode.target)
        await until(lambda: source.busy)
        cancel()
        await until(lambda: not source.busy)
    assert nodes.fetched("cancelled") == 1
    await nodes.prefill.settle()
    assert not told


async def test_an_encode_node_that_is_gone_costs_its_time(nodes: Nodes) -> None:
    await nodes.encoded(CAT)
    await nodes.encode.lose_link()
    assert same(await nodes.rows(CAT), CAT)
    assert (nodes.own.made, nodes.fetched("lost")) == (["cat"], 1)
    assert same(await nodes.rows(DOG), DOG)
    assert nodes.fetched("lost") == 1, "it is left alone for a while"


async def test_one_that_is_late_is_not_waited_for(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_fetch, "MIN_S", 0.2)
    await nodes.encoded(CAT)
    with nodes.encode.frozen_engine():
        assert same(await nodes.rows(CAT), CAT)
    assert (nodes.own.made, nodes.fetched("late")) == (["cat"], 1)


async def test_rows_that_were_evicted_are_made_again(nodes: Nodes) -> None:
    await nodes.encoded(CAT)
    nodes.encode.loaded.engine.submit(lambda engine: engine.pool.forget(engine.pool.match(runs(nodes, CAT)[:1])))
    assert await nodes.encoded(CAT) == 1
    assert same(await nodes.rows(CAT), CAT)


def runs(nodes: Nodes, item: MediaItem) -> list[bytes]:
    return nodes.encode.service.endpoints.embeddings.blocks.hashes(ROOT, item)  # type: ignore[no-any-return]


async def test_what_goes_wrong_in_the_encoder_is_told(nodes: Nodes) -> None:
    nodes.theirs.error = nodes.own.error = StepFailed("an encoder out of order")
    assert (await nodes.post(asking([CAT]))).status_code == 503
    with pytest.raises(KvferryError, match="out of order"):
        await nodes.rows(CAT)


async def test_rows_that_cannot_even_be_asked_for_are_told(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*asked: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(nodes.own, "submit", submit)
    with pytest.raises(RuntimeError, match="new thread"):
        await nodes.rows(CAT)


async def test_pools_report_no_rows_to_tiers(nodes: Nodes) -> None:
    await nodes.encoded(CAT)
    await nodes.rows(CAT)
    for node in (nodes.encode, nodes.prefill):
        assert set(runs(nodes, CAT)) <= node.engine.pool.changes.untiered


async def test_media_larger_than_the_pool_are_refused(nodes: Nodes) -> None:
    answer = await nodes.post(asking([picture("wall", 0, 64 * 3)]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


async def test_a_caller_that_leaves_cancels(nodes: Nodes) -> None:
    nodes.theirs.go.clear()
    call = asyncio.create_task(nodes.post(asking([CAT])))
    await until(lambda: nodes.theirs.asked == 1)
    call.cancel()
    await until(lambda: not nodes.encode.service.busy())
    assert nodes.theirs.cancelled == 1


async def test_a_request_is_answered_within_its_deadline(nodes: Nodes) -> None:
    nodes.theirs.go.clear()
    answer = await nodes.post(asking([CAT], deadline_s=0.2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (pack(Encoded(1)), "body"),
        (asking([]), "media"),
        (asking([CAT], b"short"), "root"),
        (asking([CAT], deadline_s=-1.0), "deadline_s"),
        (asking([replace(CAT, length=0)]), "media[0]"),
        (asking([CAT, replace(DOG, modality="smell")]), "media[1]"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_name(nodes: Nodes, body: bytes, field: str) -> None:
    answer = await nodes.post(body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_the_last_encode_node_ends_at_once() -> None:
    """Nobody needs to relieve it: the nodes that compute prompts encode."""
    began = time.monotonic()
    async with worker("encode", with_encoder(ToySource()), respawned=False, drain_timeout=60.0):
        pass
    assert time.monotonic() - began < 30.0
