"""A model engine, the reader of its events and the mirror: rows always are what the engine can reuse.

Events are lost, come twice, and are repeated from a ring that may be too short; the engine restarts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.engine_adapter.cache_mirror import CacheMirror
from kvferry.engine_adapter.engine import KvEventSource
from kvferry.engine_adapter.kv_events import KvEvents, follow
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from tests.engine_adapter.mock_kv_events import pack
from tests.engine_adapter.model_cache import ModelCache, Prefix

SIZE, BLOCKS, PRINT = 2, 12, "fingerprint"
LORAS = {"lora": "lora-id"}


class RingWire:
    """A wire in memory. A message of None is a silence."""

    def __init__(self, ring: int, *, repeats: bool) -> None:
        self.repeats, self.ring = repeats, deque[tuple[int, bytes]](maxlen=ring)
        self.messages: deque[tuple[int, bytes] | None] = deque()
        self.answers_at_most = 1000
        self.more, self.waiting = asyncio.Event(), asyncio.Event()

    async def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        if not self.messages:
            self.more.clear()
            self.waiting.set()
            await self.more.wait()
        return self.messages.popleft()

    async def ask(self, start: int) -> AsyncGenerator[tuple[int, bytes] | None, None]:
        found = [each for each in self.ring if each[0] >= start]
        for each in found[: self.answers_at_most]:
            yield each
        if len(found) <= self.answers_at_most:
            yield None

    def close(self) -> None:
        self.messages.clear()

    def put(self, message: tuple[int, bytes] | None) -> None:
        self.messages.append(message)
        self.waiting.clear()
        self.more.set()


class MirroredEngine(RuleBasedStateMachine):
    """`lost`: whether batches were lost that the reader cannot know of yet; then rows may be wrong."""

    @initialize(ring=st.sampled_from([1, 3, 1000]), repeats=st.booleans(), before=st.integers(0, 3))
    def begin(self, ring: int, repeats: bool, before: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.model, self.clock, self.number, self.lost = ModelCache(BLOCKS, SIZE), 0.0, 0, False
        self.restarts = self.seen_restarts = 0
        self.noted: set[bytes] = set()
        self.exact = True  # whether the mirror has heard of everything that is cached
        self.loop.run_until_complete(self._start(ring, repeats))
        for at in range(before):
            self.model.run([at, at, at, at, at])
            self.publish(drop=True, times=1)
        self.exact = not before or (repeats and before <= ring)
        self.task = self.loop.create_task(follow(self.events, self.mirror, self._restarted))
        self.settle()
        self.lost = False

    async def _start(self, ring: int, repeats: bool) -> None:
        self.wire = RingWire(ring, repeats=repeats)
        self.events = KvEvents(KvEventSource("none"), self.wire)
        self.mirror = CacheMirror(
            PRINT, SIZE, total_blocks=BLOCKS, adapter_id=LORAS.get, note=self._note
        )  # fmt: skip

    def _restarted(self) -> None:
        self.seen_restarts += 1

    def _note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.noted -= set(removed)
        self.noted |= set(stored)

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.wait_for(self.wire.waiting.wait(), 5))

    def publish(self, *, drop: bool, times: int) -> None:
        if not (events := self.model.take()):
            return
        self.clock += 1.0
        message = (self.number, pack(events, self.clock))
        self.number += 1
        self.wire.ring.append(message)
        for _ in range(0 if drop else times):
            self.wire.put(message)
        if drop:
            self.lost = True
            return
        resets = self.events.counters.resets
        self.settle()
        if self.lost and not self.wire.repeats:
            self.exact = False
        self.lost = False
        if self.events.counters.resets > resets:
            self.exact = False

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from(["", "tenant"]),
        lora=st.sampled_from(["", "lora"]),
        fresh=st.booleans(),
        drop=st.integers(0, 5).map(lambda drawn: drawn == 0),
        times=st.sampled_from([1, 1, 2]),
    )
    def run(self, tokens: list[int], salt: str, lora: str, fresh: bool, drop: bool, times: int) -> None:
        predicted = self.mirror.held(tokens, salt, LORAS.get(lora, ""))
        reused = self.model.run(tokens, salt, lora, fresh=fresh)
        if self.exact and not self.lost and not fresh:
            assert predicted == reused
        self.publish(drop=drop, times=times)

    @rule(slots=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4), drop=st.booleans())
    def evict(self, slots: list[int], drop: bool) -> None:
        for slot in slots:
            self.model.evict(slot)
        self.publish(drop=drop, times=1)

    @rule()
    def reset(self) -> None:
        self.model.reset()
        self.publish(drop=False, times=1)
        self.exact = True

    @rule(old=st.integers(0, 3))
    def come_again(self, old: int) -> None:
        for message in list(self.wire.ring)[old : old + 1]:
            if not self.lost:
                self.wire.put(message)
        self.settle()

    @precondition(lambda self: self.wire.repeats)
    @rule(at_most=st.sampled_from([1000, 2]))
    def silence(self, at_most: int) -> None:
        """The reader asks; an answer may end early."""
        self.wire.answers_at_most = at_most
        resets = self.events.counters.resets
        self.wire.put(None)
        self.settle()
        self.wire.answers_at_most = 1000
        self.lost = False
        if self.events.counters.resets > resets:
            self.exact = False

    @precondition(lambda self: self.events.counters.batches and not self.lost)
    @rule(missed=st.booleans())
    def restart(self, missed: bool) -> None:
        """missed: the new engine's first batch; the second one must not have the number that is next by chance."""
        missed = missed and self.wire.repeats and self.number > 1
        self.model = ModelCache(BLOCKS, SIZE)
        self.wire.ring.clear()
        self.number = 0
        self.model.run([0, 1, 0])
        self.publish(drop=missed, times=1)
        self.model.run([1, 1, 0])
        self.publish(drop=False, times=1)
        self.restarts += 1
        assert self.seen_restarts == self.restarts
        self.exact = (self.wire.repeats and self.wire.ring.maxlen > 1) or not missed or not self.wire.repeats

    @invariant()
    def rows_are_what_the_engine_can_reuse(self) -> None:
        if not hasattr(self, "mirror"):
            return
        rows = self.mirror.rows()
        assert self.noted == set(rows)
        places = {row: at for at, row in enumerate(rows)}
        if self.lost:
            return
        true = {self.row(each) for each in self.model.reachable()}
        assert set(rows) == true if self.exact else set(rows) <= true
        for each in self.model.reachable():
            if len(each.tokens) > SIZE and self.row(each) in places:
                before = Prefix(each.tokens[:-SIZE], each.salt, each.lora)
                assert places[self.row(before)] < places[self.row(each)]
        assert self.mirror.blocks <= BLOCKS

    def row(self, each: Prefix) -> bytes:
        return rows_of(chain(root_hash(PRINT, each.salt, LORAS.get(each.lora, "")), each.tokens, SIZE))[-1]

    def teardown(self) -> None:
        if hasattr(self, "task"):
            self.task.cancel()
            self.loop.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
            self.loop.close()


MirroredEngine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestMirroredEngine = MirroredEngine.TestCase
