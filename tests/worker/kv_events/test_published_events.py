"""KV events of a node: a reader outside rebuilds the pool's blocks from them, whatever happens to the pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import tempfile
from collections.abc import AsyncIterator

import pytest
import zmq

from kvferry.engine.block_contents import BlockContents
from kvferry.engine.engine import Engine
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import namespace
from kvferry.worker.kv_events import publisher
from kvferry.worker.kv_events.config import KvEventsConfig
from kvferry.worker.kv_events.event_encoder import EventEncoder, short
from tests.decode_worker.scale_out.generate_client import Client, client_of
from tests.toy import VOCAB, make_engine, make_job
from tests.waiting import until
from tests.worker.kv_events.event_reader import EventReader, reading, replayed
from tests.worker_pair import Worker, pair, worker


@contextlib.asynccontextmanager
async def published(engine: Engine, **config: object) -> AsyncIterator[tuple[Worker, EventReader, str]]:
    """A decode node with KV events, a reader from their start on, and the address of replays."""
    with tempfile.TemporaryDirectory() as folder:
        address, replays = f"ipc://{folder}/events", f"ipc://{folder}/replays"
        given = json.dumps({"endpoint": address, "replay_endpoint": replays, **config})
        with reading(address, topic=str(config.get("topic", "")).encode()) as reader:
            async with worker("decode", engine, enable_scale_out=True, kv_events_config=given) as node:
                yield node, reader, replays


async def agrees(node: Worker, reader: EventReader) -> None:
    """Wait until the reader's blocks are those of the pool."""

    def same() -> bool:
        reader.read()
        return sorted(reader.blocks.values()) == sorted(node.engine.pool.findable())

    await until(same)
    assert all(short(own) == told for told, own in reader.blocks.items())


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


async def connected(client: Client, reader: EventReader) -> None:
    """Wait until the reader gets what is published; what it missed before is dropped."""
    for seed in range(1000, 1200):
        await client.whole(prompt(4, seed), params={"max_tokens": 1})
        await asyncio.sleep(0.02)
        if reader.socket.poll(0):
            return
    raise AssertionError("nothing arrives")


async def caught_up(client: Client, reader: EventReader, replays: str) -> None:
    """Connect the reader and replay what it missed."""
    await connected(client, reader)
    frames = reader.socket.recv_multipart()
    missed = replayed(replays, 0)
    for topic, number, batch in missed:
        reader.apply(topic, number, batch)
    assert missed[-1] == frames or int.from_bytes(frames[1], "big") < len(missed)
    while reader.socket.poll(50):
        topic, number, batch = reader.socket.recv_multipart()
        if int.from_bytes(number, "big") > reader.number:
            reader.apply(topic, number, batch)


async def test_a_reader_rebuilds_the_pool_through_growth_and_eviction() -> None:
    async with published(make_engine(num_blocks=24), topic="kv@toy") as (node, reader, replays):
        async with client_of(node) as client:
            await caught_up(client, reader, replays)
            for seed in range(30):
                await client.whole(prompt(random.Random(seed).randint(1, 40), seed % 7), params={"max_tokens": 9})
                await agrees(node, reader)
        assert {"BlockStored", "BlockRemoved"} <= set(reader.types)
        assert node.node.metrics.evictions._value.get() > 0
        await node.settle()


async def test_requests_side_by_side_are_told_in_order() -> None:
    async with published(make_engine(num_blocks=48)) as (node, reader, replays), client_of(node) as client:
        await caught_up(client, reader, replays)
        shared = prompt(20, 1)
        asked = [client.whole([*shared, *prompt(n, n)], params={"max_tokens": 20}) for n in range(6)]
        await asyncio.gather(*asked)
        await agrees(node, reader)
        assert len(replayed(replays, reader.number)) == 1
        await node.settle()


async def test_a_gap_is_closed_by_a_replay_and_old_batches_are_gone() -> None:
    async with published(make_engine(), buffer_steps=5) as (node, _, replays), client_of(node) as client:
        for seed in range(12):
            await client.whole(prompt(8, seed), params={"max_tokens": 1})
        await until(lambda: node.service.endpoints._kv_events._number >= 12)
        last = node.service.endpoints._kv_events._number - 1
        kept = [int.from_bytes(frames[1], "big") for frames in replayed(replays, 0)]
        assert kept == list(range(last - 4, last + 1))
        assert [int.from_bytes(frames[1], "big") for frames in replayed(replays, last - 1)] == [last - 1, last]
        assert replayed(replays, last + 1) == []
        await node.settle()


async def test_a_replay_asked_for_in_an_unknown_form_does_no_harm() -> None:
    async with published(make_engine()) as (node, _, replays), client_of(node) as client:
        await client.whole(prompt(8, 1))
        context = zmq.Context()
        asking = context.socket(zmq.DEALER)
        asking.connect(replays)
        for frames in ((b"",), (b"x",), (b"", b"123"), (b"", b"12345678", b"more"), (b"", b"x" * 4096)):
            asking.send_multipart(frames)
        await until(lambda: replayed(replays, 0))
        context.destroy(0)
        await node.settle()


async def test_changes_beyond_the_bound_are_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with published(make_engine()) as (node, reader, replays), client_of(node) as client:
        await caught_up(client, reader, replays)
        await client.whole(prompt(20, 3))
        await agrees(node, reader)
        monkeypatch.setattr(publisher, "MAX_NOTED", 2)
        await client.whole(prompt(30, 4))
        monkeypatch.undo()
        await agrees(node, reader)
        assert "AllBlocksCleared" in reader.types
        await client.whole(prompt(30, 5))
        await agrees(node, reader)
        await node.settle()


async def test_salts_and_adapters_are_told() -> None:
    async with published(make_engine()) as (node, reader, replays), client_of(node) as client:
        await caught_up(client, reader, replays)
        await agrees(node, reader)
        reader.namespace = namespace("", "pepper")
        await client.whole(prompt(9, 2), cache_salt="pepper", params={"max_tokens": 8})
        await until(lambda: (reader.read(), len(reader.events) > 1)[1])
        await agrees(node, reader)
        salted = [event for event in reader.events if "extra_keys" in event]
        assert [keys for event in salted for keys in event["extra_keys"]] == [["pepper"], None, None, None]
        assert all("lora_name" not in event for event in reader.events)
        encoder = node.service.endpoints._kv_events._encoder
        node.loaded._adapters.held = (AdapterName("style", "f" * 32),)
        assert (encoder._adapter_name("f" * 32), encoder._adapter_name("gone")) == ("style", "gone")
        await node.settle()


async def test_shipped_blocks_are_told_too() -> None:
    """A prompt that another node computed arrives with its tokens; told as if computed here."""
    async with pair() as router:
        contents = router.decode.engine.pool.contents = BlockContents()
        answer = router.post_prefill(make_job("a", prompt(18, 1)), router.decode.target)
        await answer.ended()
        await until(lambda: router.finished("a"))
        pool = router.decode.engine.pool
        assert sorted(contents.hashes()) == sorted(pool.findable())
        found = [contents.get(block_hash) for block_hash in pool.findable()]
        assert [token for each in found[:4] if each for token in each.token_ids] == prompt(18, 1)[:16]
        for each in (router.prefill, router.decode):
            await each.settle()


def test_an_address_in_use_is_a_mistake_of_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for config in (
            KvEventsConfig(endpoint=f"tcp://*:{port}"),
            KvEventsConfig(endpoint="inproc://a", replay_endpoint=f"tcp://127.0.0.1:{port}"),
        ):
            contents = BlockContents()
            with pytest.raises(ConfigError, match=f":{port} cannot be used"):
                publisher.KvEventPublisher(config, contents, EventEncoder(contents, 4, str))
