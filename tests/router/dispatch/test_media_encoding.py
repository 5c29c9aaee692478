"""Attempts with media: an encode node has their rows before they are sent, and its failures cost their time alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest

from kvferry.placement.encoders import USUAL_TOKENS_PER_S
from kvferry.placement.types import Demand
from kvferry.protocol.errors import DeadlineExceeded, Overloaded
from kvferry.protocol.hashing import chain, embedding_hashes, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Rates
from kvferry.protocol.media import Encoded, MediaItem, block_extras
from kvferry.router.dispatch.prompt_media import PromptMedia, with_encoding
from tests.fake_workers import (
    BLOCK,
    CRASH,
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    encode,
    expected,
    ids,
    prefill,
)
from tests.waiting import until

CAT, DOG = MediaItem("image", "cat", 5, 9, b"tensors"), MediaItem("image", "dog", 20, 50, b"more")
MEDIA = PromptMedia((CAT, DOG), "fp")
SEES = {"modalities": ("image",), "media_row_bytes": 100}
ROOT = root_hash("fp", "tenant")


def nodes(*encoders: FakeWorker) -> list[FakeWorker]:
    return [prefill(changes=SEES), decode(changes=SEES), *encoders]


async def answered(bench: Bench, **spec: Any) -> FakeWorker:
    """The prefill node after one request with two pictures."""
    assert ids(await collect(bench.start(media=MEDIA, namespace="tenant", **spec))) == expected(PROMPT, 8)
    return bench["p1"]


def outcomes(bench: Bench) -> dict[str, int]:
    return {name: int(value) for name, each in bench.metrics.encodes.calls.items() if (value := each._value.get())}


async def announce(bench: Bench, name: str, *runs: list[bytes]) -> None:
    for run in runs:
        await bench.store.publish(name, 1, rows_of(run), [])


def run(item: MediaItem) -> list[bytes]:
    return embedding_hashes(ROOT, item.hash, -(-item.length * 100 // 1000))


async def test_the_prompts_node_is_told_who_has_the_rows() -> None:
    async with Bench(nodes(encode())) as bench:
        told = await answered(bench)
        (asked,) = bench["e1"].encoded
        assert (asked.root, asked.media) == (ROOT, (CAT, DOG))
        (request,) = told.prefills
        assert request.job.encoder == bench["e1"].lease.target
        assert request.job.media == (CAT, DOG), "it can encode them itself, should they not come"
        assert outcomes(bench) == {"encoded": 1}
        assert bench.cluster.ready() == {"prefill": 1, "decode": 1, "encode": 1}


async def test_prompts_computed_on_a_decode_node_are_encoded_elsewhere_too() -> None:
    async with Bench([decode(changes=SEES), encode(encodings=[Encoded(0)])]) as bench:
        assert ids(await collect(bench.start(media=MEDIA))) == expected(PROMPT, 8)
        assert bench["d1"].jobs[0].encoder == bench["e1"].lease.target
        assert outcomes(bench) == {"cached": 1}


async def test_prompts_without_media_and_clusters_without_encode_nodes_do_without() -> None:
    async with Bench(
        nodes(encode(changes={"modalities": ("audio",)}), encode("e2", changes={"fingerprint": "f2"}))
    ) as bench:
        assert (await answered(bench)).prefills[0].job.encoder is None
        assert ids(await collect(bench.start())) == expected(PROMPT, 8)
        assert bench["e1"].encoded == bench["e2"].encoded == []
        assert outcomes(bench) == {}


@pytest.mark.parametrize("failure", [CRASH, Overloaded("full"), CAT, SILENCE])
async def test_another_encode_node_is_asked_if_one_fails(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.dispatch.media_encoding.MIN_LIMIT_S", 0.3)
    monkeypatch.setattr("kvferry.router.dispatch.media_encoding.LIMIT_FACTOR", 0.0)
    failing = [encode(name, encodings=[failure]) for name in ("e1", "e2")]
    async with Bench(nodes(*failing)) as bench:
        failing[1].encodings.clear() if await home(bench) == "e1" else failing[0].encodings.clear()
        told = await answered(bench)
        assert len(bench["e1"].encoded) == len(bench["e2"].encoded) == 1
        assert told.prefills[0].job.encoder is not None
        assert outcomes(bench) == {"encoded": 1, "failed": 1}


async def home(bench: Bench) -> str:
    """The encode node that is asked first: which of two equal ones depends on the picture."""
    from zlib import crc32

    return min(("e1", "e2"), key=lambda name: crc32(f"{name} {CAT.hash}".encode()))


@pytest.mark.parametrize("failure", [CRASH, Overloaded("full")])
async def test_the_prompts_node_encodes_if_all_fail(failure: Any) -> None:
    async with Bench(nodes(*(encode(f"e{n}", encodings=[failure]) for n in range(3)))) as bench:
        began = time.monotonic()
        assert (await answered(bench)).prefills[0].job.encoder is None
        assert time.monotonic() - began < 5.0
        assert outcomes(bench) == {"failed": 2, "local": 1}


async def test_a_node_that_hangs_is_given_up_when_it_is_suspected() -> None:
    async with Bench(nodes(encode(encodings=[SILENCE])), silence_s=0.6) as bench:
        began = time.monotonic()
        bench["e1"].frozen = True
        assert (await answered(bench)).prefills[0].job.encoder is None
        assert time.monotonic() - began < 5.0
        assert outcomes(bench) in ({"failed": 1, "local": 1}, {})


async def test_the_node_that_holds_the_rows_is_asked() -> None:
    async with Bench(nodes(*(encode(f"e{n}") for n in range(3)))) as bench:
        await announce(bench, "e2", run(CAT), run(DOG))
        await announce(bench, "e1", run(DOG)[:2])
        await announce(bench, "e0", run(CAT))
        await answered(bench)
        assert [len(bench[f"e{n}"].encoded) for n in range(3)] == [0, 0, 1]


async def test_rows_that_the_prompts_node_holds_are_asked_of_nobody() -> None:
    async with Bench(nodes(encode())) as bench:
        await announce(bench, "p1", run(CAT), run(DOG))
        assert (await answered(bench)).prefills[0].job.encoder is None
        assert (bench["e1"].encoded, outcomes(bench)) == ([], {})


async def test_only_media_beyond_the_cached_prefix_are_encoded() -> None:
    async with Bench(nodes(encode())) as bench:
        hashes = chain(ROOT, PROMPT, BLOCK, extras=block_extras(MEDIA.items, BLOCK))
        await bench.store.publish("p1", 1, rows_of(hashes[:5]), [])
        await answered(bench)
        assert [asked.media for asked in bench["e1"].encoded] == [(DOG,)]


async def test_a_slow_pool_of_encode_nodes_leaves_the_work_to_the_prompts_node() -> None:
    slow, fast = Rates(media_tokens_per_s=1.0), Rates(media_tokens_per_s=1000.0)
    workers = [prefill(changes=SEES | {"rates": fast}), decode(changes=SEES), encode(changes={"rates": slow})]
    async with Bench(workers) as bench:
        assert (await answered(bench)).prefills[0].job.encoder is None
        assert outcomes(bench) == {"local": 1}


async def test_a_request_that_is_given_up_leaves_no_call_and_no_booking() -> None:
    async with Bench(nodes(encode(encodings=[SILENCE]))) as bench:
        task = asyncio.create_task(collect(bench.start(media=MEDIA)))
        await until(lambda: bench["e1"].encoded)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (bench["p1"].prefills, outcomes(bench)) == ([], {})


async def test_a_first_token_is_late_only_after_the_time_of_encoding() -> None:
    async with Bench(nodes(encode())) as bench:
        model = bench.cluster.model
        plain = bench.cluster.place(Demand(len(PROMPT)), {})
        longer = with_encoding(plain, MEDIA, model)
        assert longer.first_token_s == plain.first_token_s + 59 / USUAL_TOKENS_PER_S
        cached = replace(plain, cached_len=len(PROMPT))
        assert with_encoding(cached, PromptMedia((CAT,), "fp"), model) is cached


@pytest.mark.parametrize(("deadline_s", "blamed"), [(0.6, False), (60.0, True)])
async def test_a_node_is_blamed_only_if_it_had_the_time_of_its_work(
    deadline_s: float, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.router.dispatch.media_encoding.MIN_LIMIT_S", 1.0)
    monkeypatch.setattr("kvferry.router.dispatch.media_encoding.LIMIT_FACTOR", 0.0)
    async with Bench(nodes(encode(encodings=[SILENCE]))) as bench:
        with contextlib.suppress(DeadlineExceeded, Overloaded):
            await collect(bench.start(media=MEDIA, deadline_s=deadline_s))
        assert (("e1", 1) in bench.nodes.breakers.open().nodes) == blamed
