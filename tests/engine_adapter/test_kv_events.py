"""KvEvents on real sockets: order, gaps, repeats, restarts, and what cannot be read."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine_adapter import kv_events as kv_events_module
from kvferry.engine_adapter.engine import KvEventSource
from kvferry.engine_adapter.kv_event_batch import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    MalformedBatch,
    decode,
)
from kvferry.engine_adapter.kv_events import KvEvents, Reset, follow
from kvferry.engine_adapter.zmq_events import ZmqEvents
from kvferry.protocol.errors import ConfigError
from tests.engine_adapter.mock_kv_events import MockKvEvents, pack
from tests.waiting import until


def removed(key: int) -> list[dict[str, Any]]:
    return [{"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"}]


def keys_of(batch: EventBatch) -> list[Any]:
    return [key for event in batch.events if isinstance(event, BlocksRemoved) for key in event.keys]


class Reading:
    """Reads in the background. items: keys of removed blocks, "reset" and "restart"."""

    def __init__(self, source: KvEventSource, *, poll_s: float = 0.3, answer_s: float = 1.0) -> None:
        self.events = KvEvents(source, ZmqEvents(source, answer_s), poll_s=poll_s)
        self.items: list[int | str] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self.events.batches()) as batches:
            async for item in batches:
                if isinstance(item, Reset):
                    self.items.append("restart" if item.restarted else "reset")
                else:
                    self.items += keys_of(item)

    async def has(self, *items: int | str) -> None:
        try:
            await until(lambda: self.items == list(items), 8.0)
        except AssertionError:
            assert self.items == list(items)
            raise

    async def stays(self, *items: int | str) -> None:
        await self.has(*items)
        await asyncio.sleep(0.4)
        assert self.items == list(items)


@pytest.fixture
async def publish() -> AsyncIterator[Callable[..., MockKvEvents]]:
    made: list[MockKvEvents] = []

    def make(**settings: Any) -> MockKvEvents:
        made.append(MockKvEvents(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
async def read() -> AsyncIterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def make(source: KvEventSource, **settings: Any) -> Reading:
        made.append(Reading(source, **settings))
        return made[-1]

    yield make
    for each in made:
        each.task.cancel()
        await asyncio.gather(each.task, return_exceptions=True)


async def test_batches_from_before_and_new_ones_come_in_order(publish, read):
    engine = publish()
    for key in range(5):
        engine.publish(removed(key))
    reader = read(engine.source)
    await reader.has(0, 1, 2, 3, 4)
    for key in range(5, 10):
        engine.publish(removed(key))
    await reader.has(*range(10))
    assert reader.events.counters.resets == 0
    assert engine.asked[0] == 0


async def test_an_oldest_batch_that_is_not_the_first_is_no_reset(publish, read):
    """What a suffix of the events says is true: it may only be too little."""
    engine = publish(ring=3)
    for key in range(8):
        engine.publish(removed(key))
    reader = read(engine.source)
    await reader.stays(5, 6, 7)


async def test_a_gap_is_filled(publish, read):
    engine = publish()
    reader = read(engine.source, poll_s=30.0)
    await engine.subscribed()
    engine.publish(removed(0))
    await reader.has(0)
    engine.publish(removed(1), drop=True)
    engine.publish(removed(2), drop=True)
    engine.publish(removed(3))
    await reader.has(0, 1, 2, 3)
    engine.publish(removed(4))
    await reader.has(0, 1, 2, 3, 4)
    counters = reader.events.counters
    assert (counters.gaps, counters.resets, counters.batches) == (1, 0, 5)
    assert counters.repeated >= 3, "the replay overlaps with what comes meanwhile"


async def test_a_missing_first_batch_is_a_gap(publish, read):
    engine = publish()
    reader = read(engine.source, poll_s=30.0)
    await engine.subscribed()
    await until(lambda: engine.asked)
    await asyncio.sleep(0.2)
    engine.publish(removed(0), drop=True)
    engine.publish(removed(1))
    await reader.stays(0, 1)
    assert (reader.events.counters.gaps, reader.events.counters.resets) == (1, 0)


async def test_the_last_batch_before_silence_is_found(publish, read):
    engine = publish()
    reader = read(engine.source, poll_s=0.2)
    await engine.subscribed()
    engine.publish(removed(0))
    engine.publish(removed(1), drop=True)
    await reader.stays(0, 1)
    assert reader.events.counters.resets == 0


async def test_a_gap_without_repeats_is_a_reset(publish, read):
    engine = publish(repeats=False)
    reader = read(engine.source)
    await engine.subscribed()
    engine.publish(removed(0))
    engine.publish(removed(1), drop=True)
    engine.publish(removed(2))
    await reader.stays(0, "reset", 2)
    assert (reader.events.counters.gaps, reader.events.counters.resets) == (1, 1)


async def test_a_gap_longer_than_the_ring_is_a_reset_and_the_rest(publish, read):
    engine = publish(ring=3)
    reader = read(engine.source, poll_s=30.0)
    await engine.subscribed()
    engine.publish(removed(0))
    await reader.has(0)
    for key in range(1, 9):
        engine.publish(removed(key), drop=True)
    engine.publish(removed(9))
    await reader.stays(0, "reset", 7, 8, 9)


async def test_a_gap_whose_question_is_not_answered_is_a_reset(publish, read):
    engine, silent = publish(repeats=False), publish()
    source = KvEventSource(engine.source.endpoint, engine.source.endpoint)  # A PUB socket answers nothing.
    assert silent.source.replay
    reader = read(source, answer_s=0.2)
    await engine.subscribed()
    engine.publish(removed(0))
    engine.publish(removed(1), drop=True)
    engine.publish(removed(2))
    await reader.stays(0, "reset", 2)


async def test_copies_and_old_batches_are_dropped(publish, read):
    engine = publish()
    reader = read(engine.source)
    await engine.subscribed()
    payloads = [pack(removed(key)) for key in range(3)]
    for payload in payloads:
        engine.publish_payload(payload, times=3)
    for number, payload in enumerate(payloads):
        engine.send(number, payload)
    engine.publish(removed(3))
    await reader.stays(0, 1, 2, 3)
    assert (reader.events.counters.old, reader.events.counters.resets) == (9, 0)


@pytest.mark.parametrize("repeats", [True, False])
async def test_numbers_that_begin_again_are_another_engine(publish, read, repeats):
    engine = publish(repeats=repeats)
    reader = read(engine.source)
    await engine.subscribed()
    for key in range(3):
        engine.publish(removed(key))
    await reader.has(0, 1, 2)
    engine.restart()
    engine.publish(removed(10))
    engine.publish(removed(11))
    await reader.stays(0, 1, 2, "restart", 10, 11)
    assert reader.events.counters.restarts == 1


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_restart_whose_first_batches_were_missed_is_seen(publish, read, repeats):
    engine = publish(repeats=repeats)
    reader = read(engine.source, poll_s=30.0)
    await engine.subscribed()
    for key in range(5):
        engine.publish(removed(key))
    await reader.has(0, 1, 2, 3, 4)
    engine.restart()
    engine.publish(removed(10), drop=True)
    engine.publish(removed(11))
    await reader.stays(0, 1, 2, 3, 4, "restart", *([10] if repeats else []), 11)


@pytest.mark.parametrize("batches", [0, 2, 3, 4])
async def test_a_restart_of_a_silent_engine_is_seen(publish, read, batches):
    """Also if the new engine's number is that of the old one."""
    engine = publish()
    reader = read(engine.source, poll_s=0.1)
    await engine.subscribed()
    for key in range(3):
        engine.publish(removed(key))
    await reader.has(0, 1, 2)
    questions = len(engine.asked)
    await until(lambda: len(engine.asked) > questions + 1)
    engine.restart()
    for key in range(10, 10 + batches):
        engine.publish(removed(key), drop=True)
    await reader.stays(0, 1, 2, "restart", *range(10, 10 + batches))


async def test_an_answer_with_holes_is_asked_for_again(publish, read):
    """ZeroMQ drops what a client's queue cannot take, in the middle of an answer or its end."""
    engine = publish(replay_hwm=20)
    for key in range(500):
        engine.publish([*removed(key), {"type": "Padding", "bytes": b"x" * 50_000}])
    reader = read(engine.source, answer_s=0.3, poll_s=0.1)
    await until(lambda: reader.items and reader.items[-1] == 499, 60.0)
    assert reader.items == list(range(500))
    assert len(engine.asked) > 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb([1.0, 5]), pack([{"type": "BlockRemoved"}], 1.0)])
async def test_a_batch_that_cannot_be_read_is_a_reset(publish, read, payload):
    engine = publish(repeats=False)
    reader = read(engine.source)
    await engine.subscribed()
    engine.publish(removed(0))
    engine.publish_payload(payload)
    engine.publish(removed(2))
    await reader.stays(0, "reset", 2)
    assert reader.events.counters.unread == 1


async def test_strange_events_and_messages_are_passed_over(publish, read, caplog):
    engine = publish()
    reader = read(engine.source)
    await engine.subscribed()
    stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": ["a"], "block_size": 1}
    engine.send_frames([b"alone"])
    engine.send_frames([b"", b"123", b""])
    engine.send_frames([b"", b"\xff" * 8, b""])
    for _ in range(50):
        engine.publish([{"type": "BlockMoved"}, 7, None, stored, *removed(0)])
    await reader.stays(*[0] * 50)
    assert (reader.events.counters.unknown, reader.events.counters.malformed) == (150, 50)
    assert len([each for each in caplog.records if "unknown types" in each.message]) == 1


async def test_other_topics_are_not_read(publish, read):
    engine = publish(topic="kv@pod-1")
    reader = read(engine.source)
    await engine.subscribed()
    engine.send_frames([b"load@pod-1", (0).to_bytes(8, "big"), pack(removed(9))])
    engine.publish(removed(0))
    await reader.stays(0)


async def test_a_slow_mirror_does_not_stop_the_engine_or_the_loop(publish):
    engine, seen = publish(), list[int]()

    class Slow:
        def take(self, batch: EventBatch) -> None:
            seen.extend(keys_of(batch))

        def forget(self) -> None:
            seen.clear()

    restarts: list[None] = []
    events = KvEvents(engine.source)
    task = asyncio.create_task(follow(events, Slow(), lambda: restarts.append(None)))
    await engine.subscribed()
    turns = 0
    for key in range(2000):
        engine.publish(removed(key))
    while len(seen) < 2000:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 1000, "the loop's other tasks had no turn between batches"
    engine.restart()
    engine.publish(removed(-1))
    await until(lambda: seen == [-1])
    assert len(restarts) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_pyzmq_and_addresses_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match="cannot connect"):
        KvEvents(KvEventSource("nonsense"))
    monkeypatch.delitem(sys.modules, "kvferry.engine_adapter.zmq_events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kvferry\[adapter\]"):
        KvEvents(KvEventSource("tcp://127.0.0.1:1"))


def test_both_forms_of_events_are_read():
    fields = [[5, b"k"], 3, [1, 2, 3, 4], 2, None, "GPU", "lora", [["lora", "salt"], None], 0]
    names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
             "extra_keys", "group_idx"]  # fmt: skip
    as_map = pack([{"type": "BlockStored", **dict(zip(names, fields, strict=True))}, {"type": "AllBlocksCleared"}], 1.5)
    as_array = pack([["BlockStored", *fields], ["AllBlocksCleared"], ["Other", 1], []], 1.5)
    batch = decode(as_map)
    stored, cleared = batch.events
    assert isinstance(stored, BlocksStored)
    assert stored.keys == [5, b"k"]
    assert list(stored.token_ids) == [1, 2, 3, 4]
    assert (stored.parent, stored.lora, stored.medium) == (3, "lora", "GPU")
    assert stored.extra_keys == [["lora", "salt"], None]
    assert cleared == AllBlocksCleared()
    assert decode(as_array).events == batch.events
    assert (decode(as_array).unknown, batch.unknown, batch.sent_at) == (2, 0, 1.5)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=5,
)
NAMED = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        name: VALUES
        for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "extra_keys",
                     "group_idx", "medium", "cache_salt", "kv_cache_spec_kind")
    },
)  # fmt: skip


@given(
    st.binary(max_size=64) | st.builds(msgpack.packb, VALUES) | st.builds(pack, st.lists(NAMED | VALUES, max_size=3))
)
def test_no_payload_breaks_the_decoder(payload):
    try:
        batch = decode(payload)
    except MalformedBatch:
        return
    for event in batch.events:
        if isinstance(event, BlocksStored):
            assert event.block_size > 0
            assert event.token_ids.typecode == "i"


async def test_a_wire_that_never_ends_a_hole_cannot_hold_the_reader():
    """Each answer lacks the second batch: it is given up, and the reader goes on."""

    class Holes:
        repeats = True

        def __init__(self) -> None:
            self.asked = 0

        async def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
            await asyncio.sleep(3600)
            return None

        async def ask(self, start: int) -> AsyncGenerator[tuple[int, bytes] | None, None]:
            self.asked += 1
            for number in (0, 2, 3):
                if number >= start:
                    yield number, pack(removed(number), float(number))
            yield None

        def close(self) -> None:
            self.closed = True

    wire, items = Holes(), list[object]()
    async with aclosing(kv_events_module.KvEvents(KvEventSource("none"), wire).batches()) as batches:
        async for item in batches:
            items.append("reset" if isinstance(item, Reset) else keys_of(item)[0])
            if item == items or items[-1] == 3:
                break
    assert items == [0, "reset", 2, 3]
    assert wire.asked == 2
    assert wire.closed


@pytest.mark.parametrize(
    "made",
    [
        "from tests.engine_adapter.mock_kv_events import MockKvEvents; MockKvEvents().publish([])",
        "from kvferry.engine_adapter.zmq_events import ZmqEvents; "
        "from kvferry.engine_adapter.engine import KvEventSource; "
        "made = ZmqEvents(KvEventSource('tcp://127.0.0.1:9')); made.again = made",
    ],
    ids=["publisher", "reader"],
)
def test_the_garbage_collector_does_not_wait_for_sockets_that_nobody_closed(made: str):
    """In a process of its own: it would hang where no limit of a test reaches it."""
    code = f"import asyncio, gc\nasync def main():\n    {made}\nasyncio.run(main())\ngc.collect()\nprint('collected')"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "collected\n", done.stderr
