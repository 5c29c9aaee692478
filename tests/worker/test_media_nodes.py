"""Prompts with images through two nodes, over real HTTP and UCX: rows where they are computed, blocks everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.engine.media.local_embeddings import LocalEmbeddings
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest, followed_by, joined
from kvferry.protocol.messages import FirstToken, Holder, Job, MoveRequest, ShipDone
from kvferry.protocol.speech import SpeechRequest
from kvferry.protocol.wire import FrameReader, pack
from kvferry.worker import media_rendering, tiers
from kvferry.worker.media_loading import NodeMedia, read_limits
from tests.media_parts import FakeEncoder, local, media_job, prompt_of, seeing_engine, seen
from tests.waiting import until
from tests.worker_pair import Router, Worker, of_toy, routed, worker

PROMPT = prompt_of([1, 2, 3], b"one", [4, 5, 6, 7], b"two", [8, 9, 10, 11, 12, 13])


@dataclass
class Seeing:
    """A node's encoder, what runs it, and its parts."""

    encoder: FakeEncoder
    embeddings: LocalEmbeddings
    parts: Any


def seeing(blocks: int = 64, **limits: int) -> Seeing:
    encoder = FakeEncoder(rope=True)
    embeddings = local(encoder)
    engine = seeing_engine(encoder, embeddings, num_blocks=blocks)
    return Seeing(encoder, embeddings, of_toy(engine, NodeMedia(encoder, embeddings, limits)))


@dataclass
class Nodes:
    router: Router
    prefill: Seeing
    decode: Seeing

    async def settle(self) -> None:
        await self.router.prefill.settle()
        await self.router.decode.settle()


@contextlib.asynccontextmanager
async def nodes(blocks: int = 64, **prefill_settings: Any) -> AsyncIterator[Nodes]:
    prefill, decode = seeing(blocks), seeing()
    async with (
        worker("prefill", prefill.parts, **prefill_settings) as one,
        worker("decode", decode.parts) as other,
        routed(one, other) as router,
    ):
        yield Nodes(router, prefill, decode)


def job(name: str, prompt: tuple[list[int], tuple[MediaItem, ...]] = PROMPT, count: int = 12, **more: Any) -> Job:
    return media_job(name, prompt, count, rope=True, **more)


async def test_a_prompt_is_shipped_and_its_stream_needs_no_image() -> None:
    async with nodes() as own:
        for name in ("first", "again"):
            asked = job(name)
            first, shipped = await own.router.post_prefill(asked, own.router.decode.target).ended()
            await until(lambda name=name: own.router.finished(name))  # type: ignore[misc]
            assert [*first.delta.token_ids, *own.router.tokens(name)] == seen(PROMPT, 12, rope=True)
            assert isinstance(shipped, ShipDone)
        assert (len(own.prefill.encoder.encoded), own.decode.encoder.encoded) == (2, [])
        metrics = own.router.prefill.node.metrics.media
        assert metrics.items["image", "encoded"]._value.get() == 2
        assert metrics.cache_bytes._value.get() == 10 * 4
        await own.settle()


async def test_a_decode_node_computes_a_prompt_with_its_images() -> None:
    async with nodes() as own:
        assert (await own.router.generate(job("a"))).status_code == 202
        await until(lambda: own.router.finished("a"))
        assert own.router.tokens("a") == seen(PROMPT, 12, rope=True)
        assert len(own.decode.encoder.encoded) == 2
        await own.settle()


async def test_a_stream_goes_on_behind_its_tokens_at_another_node() -> None:
    """What a router does after the loss of a node."""
    known = seen(PROMPT, 12, rope=True)
    async with nodes() as own:
        asked = job("a")
        await own.router.generate(replace(asked, token_ids=(*asked.token_ids, *known[:5]), attempt=1))
        await until(lambda: own.router.finished("a"))
        assert own.router.tokens("a") == known[5:]
        await own.settle()


async def test_a_prompt_whose_blocks_are_fetched_needs_no_rows() -> None:
    async with nodes() as own:
        await own.router.generate(job("a", count=1))
        await until(lambda: own.router.finished("a"))
        blocks = len(PROMPT[0]) // 4
        asked = job("b", count=1, holder=Holder(own.router.decode.target, blocks))
        (first,) = await own.router.post_prefill(asked).ended()
        assert isinstance(first, FirstToken)
        assert list(first.delta.token_ids) == seen(PROMPT, 1, rope=True)
        assert first.delta.reuse is not None
        assert (first.delta.reuse.fetched, own.prefill.encoder.encoded) == (4 * blocks, [])
        await own.settle()


async def test_blocks_with_images_come_back_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MIN_S", 30.0)
    monkeypatch.setattr(tiers.Tiers, "_computed_s", lambda self, tokens: tokens * 1.0)
    blocks = len(PROMPT[0]) // 4
    for start in range(2):
        async with nodes(kv_disk_path=str(tmp_path), kv_disk_gib=1.0) as own:
            (first,) = await own.router.post_prefill(job("a", count=1)).ended()
            assert list(first.delta.token_ids) == seen(PROMPT, 1, rope=True)
            assert first.delta.reuse.reused_prefill == start * 4 * blocks
            assert len(own.prefill.encoder.encoded) == (0 if start else 2)
            written = own.router.prefill.node.metrics.tiers.blocks["disk"]["written"]
            await until(lambda: start or written._value.get() == blocks)  # noqa: B023
            await own.settle()


async def test_a_stream_moves_without_its_images() -> None:
    source, target = seeing(), seeing()
    prompt, count = prompt_of([1, 2, 3], b"one", [4] * 40), 200
    async with (
        worker("prefill", seeing().parts) as prefill,
        worker("decode", source.parts) as one,
        worker("decode", target.parts) as other,
        routed(prefill, one) as left,
        routed(prefill, other) as right,
    ):
        asked = job("a", prompt, count)
        one.pause_at(15)
        await left.generate(asked)
        await until(lambda: one.paused)
        moving = asyncio.create_task(left._post(one, "move", MoveRequest("a", 0, 1, other.target)))
        await until(lambda: one.service._migrations._starting)
        one.resume()
        moved = await moving
        assert moved.status_code == 202, moved.text
        await until(lambda: right.finished("a"))
        assert left.tokens("a") + right.tokens("a") == seen(prompt, count, rope=True)
        assert right.tokens("a")
        assert target.encoder.encoded == []
        for node in (prefill, one, other):
            await node.settle()


def chat(*files: bytes) -> bytes:
    """A RenderRequest about pictures, as a router sends it."""
    parts = [{"type": "text", "text": "what?"}, *[{"type": "image_url", "image_url": {"url": "data:"}}] * len(files)]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "well"}]
    return b"".join(followed_by(pack(RenderRequest(json.dumps({"messages": messages}).encode())), files))


async def post(node: Worker, path: str, message: Any) -> httpx.Response:
    body = message if isinstance(message, bytes) else pack(message)
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(f"{node.node.address.url}/attempts/{path}", content=body)


async def test_nodes_make_prompts_of_chats_and_say_so_in_their_leases() -> None:
    async with nodes() as own:
        for node in (own.router.prefill, own.router.decode):
            assert node.loaded.lease().modalities == ("image",)
            answer = await post(node, "render", chat(b"a", b"b"))
            message, *datas = FrameReader().feed(answer.content)
            prompt = RenderedPrompt(message.token_ids, joined(message.media, datas), message.rope_offset)
            assert prompt.sound
            assert [item.data for item in prompt.media] == [b"a", b"b"]
            assert prompt.rope_offset == -4
            assert node.node.metrics.media.renders._value.get() == 1
            refused = await post(node, "transcribe", SpeechRequest(False, (), "a.wav", b"RIFF"))
            assert refused.status_code == 400
        await own.settle()


async def test_a_node_without_an_encoder_takes_text_alone() -> None:
    encoder = FakeEncoder()
    engine = seeing_engine(encoder, local(encoder))
    engine.media.encoder = None
    async with worker("decode", engine) as decode, routed(decode, decode) as router:
        assert decode.loaded.lease().modalities == ()
        assert (await post(decode, "render", chat(b"a"))).status_code == 400
        await router.generate(job("a"))
        await until(lambda: router.failed)
        assert router.failed[0].code == "invalid_request_error"
        await decode.settle()


async def test_more_images_than_a_limit_and_more_chats_than_threads_take(monkeypatch: pytest.MonkeyPatch) -> None:
    own = seeing(image=1)
    async with worker("decode", own.parts) as decode:
        answer = await post(decode, "render", chat(b"a", b"b"))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "a prompt may hold at most 1 images, got 2"
        assert (await post(decode, "render", chat(b"a"))).status_code == 200
        monkeypatch.setattr(media_rendering, "MAX_WAITING", 0)
        assert (await post(decode, "render", chat(b"a"))).status_code == 429


def test_limits_are_read_from_json() -> None:
    assert read_limits("") == {}
    assert read_limits('{"image": 4, "video": 0}') == {"image": 4, "video": 0}
    for wrong in ("4", "{", '{"smell": 1}', '{"image": -1}', '{"image": 65}', '{"image": true}', '{"image": "4"}'):
        with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
            read_limits(wrong)
