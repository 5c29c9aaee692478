"""Mirror of an engine's cache with the task that feeds it from KV events, and a measure of its accuracy."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence

from kvferry.engine_adapter.cache_mirror import CacheMirror
from kvferry.engine_adapter.engine import EngineCall, EngineFacts, KvEventSource
from kvferry.engine_adapter.kv_events import KvEvents, follow
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import Job
from kvferry.runtime import background

MAX_CALLS = 8192
"""Maximum number of calls in flight that are compared; the oldest ones are forgotten."""
MISSES = 3
"""Consecutive calls that reused none of what the mirror held; evictions do not explain that many."""


class MirrorAccuracy:
    """Compares what a mirror holds when a call is sent with what the engine then says it reused.

    calls       calls compared
    predicted   prompt tokens that the mirror held, over all of them
    actual      prompt tokens that the engine reused
    difference  sum of the absolute differences, in tokens
    misses      consecutive latest calls for which the mirror held blocks, but the engine reused nothing"""

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._expected: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self.calls = self.predicted = self.actual = self.difference = self.misses = 0

    def sent(
        self,
        call: Hashable,
        token_ids: Sequence[int],
        namespace: str = "",
        adapter: str = "",
        media: Sequence[MediaItem] = (),
    ) -> int:
        """Record a call that goes to the engine now; return the tokens that it should reuse."""
        held = self._mirror.held(token_ids, namespace, adapter, media)
        self._expected[call] = held, self._mirror.clears
        while len(self._expected) > MAX_CALLS:
            self._expected.popitem(last=False)
        return held

    def ended(self, call: Hashable, cached_tokens: int | None) -> None:
        """Compare a call that ended. cached_tokens: as the engine reports; None: it did not."""
        found = self._expected.pop(call, None)
        if found is None or cached_tokens is None:
            return
        expected, clears = found
        self.calls += 1
        self.predicted += expected
        self.actual += cached_tokens
        self.difference += abs(expected - cached_tokens)
        if expected and clears == self._mirror.clears:  # else the engine has reported the reset meanwhile
            self.misses = 0 if cached_tokens else self.misses + 1

    @property
    def is_stale(self) -> bool:
        """Return whether the engine must have dropped its cache without an event."""
        return self.misses >= MISSES


log = logging.getLogger("kvferry.adapter")


class Mirroring:
    """Mirror of an engine that publishes KV events. Belongs to one asyncio loop.

    adapters   kvferry's ids of LoRA adapters by the engine's names
    note       called with rows added and removed
    lost       called with the reason when the engine must count as gone

    Raises ConfigError if pyzmq is not installed."""

    def __init__(
        self,
        facts: EngineFacts,
        source: KvEventSource,
        fingerprint: str,
        adapters: Mapping[str, str],
        *,
        note: Callable[[Sequence[bytes], Sequence[bytes]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._events, self._lost = KvEvents(source), lost
        self.mirror = CacheMirror(
            fingerprint,
            facts.block_size,
            total_blocks=facts.total_blocks,
            adapter_id=adapters.get,
            note=note,
            counts_copies=facts.kind != "sglang",  # its tree of prefixes keeps one copy, and announces it per tier
        )
        self.accuracy = MirrorAccuracy(self.mirror)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the engine's events."""
        self._task = asyncio.create_task(self._follow(), name="kv-events")

    async def stop(self) -> None:
        """End the reader and its sockets."""
        if self._task is not None:
            await background.end(self._task)

    async def _follow(self) -> None:
        try:
            await follow(self._events, self.mirror, lambda: self._lost("another process publishes its KV events"))
        except Exception as error:
            log.exception("the engine's KV events cannot be read")
            self._lost(f"its KV events cannot be read: {type(error).__name__}")

    def sent(self, job: Job, call: EngineCall) -> None:
        """Note a call that goes to the engine. One that asks for log-probabilities of its prompt reuses nothing."""
        if call.params.prompt_logprobs is not None:
            return
        self.accuracy.sent((job.request_id, job.attempt), call.token_ids, job.namespace, job.adapter, job.media)

    def ended(self, job: Job, cached: int | None) -> None:
        """Compare a call's end with what the mirror held, and forget everything if the engine no longer has it.

        An engine that drops its cache while it is idle reports that with its next step, and that event may be lost."""
        self.accuracy.ended((job.request_id, job.attempt), cached)
        if self.accuracy.is_stale:
            log.warning("the engine reused nothing of what its KV events announced: forgetting its cache's contents")
            self._events.counters.resets += 1
            self.accuracy.misses = 0
            self.mirror.forget()

    def set_gauges(self, metrics: AdapterMetrics) -> None:
        """Set the gauges of the mirror."""
        accuracy, counters = self.accuracy, self._events.counters
        metrics.predicted.set(accuracy.predicted)
        metrics.actual.set(accuracy.actual)
        metrics.difference.set(accuracy.difference)
        metrics.blocks.set(self.mirror.blocks)
        metrics.resets.set(counters.resets)
        metrics.gaps.set(counters.gaps)
        metrics.repeated.set(counters.repeated)
