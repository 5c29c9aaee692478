"""Measures how a long prompt's arriving blocks affect running streams: gaps between tokens of a decode node's engine.

    python -m benchmarks.landing [--model smollm2] [--tokens 65536] [--streams 8] [--rounds 3]

Streams run alone and while a ship arrives at full speed from another process, in turns. The blocks are as large as the
model's own and all available at once, like those of a cached prompt; otherwise prefill sends no faster than it
computes. The goal: the 99th percentile stays within 1.5 times that of streams alone."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.ships import Memory, Outcomes, ship
from kvferry.engine.events import Generated
from kvferry.engine.loop import EngineLoop
from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.receiver import Receiver
from kvferry.kv_transfer.sender import Sender
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.link_messages import Commit, GrantPurpose
from kvferry.protocol.messages import DecodeTarget, Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.runtime.thread_priority import lower_priority
from kvferry.worker.engine_factory import assemble
from kvferry.worker.link_factory import LINK_NICENESS
from kvferry.worker.rates import warm_up

POOL = 512
"""Blocks of memory that all ships reuse: far more than CPU caches hold."""
PREFILL_NICENESS = 5
TOKENS = 2000
"""Tokens of a stream; a stream that ends is replaced."""


class ReusedMemory(Memory):
    def block(self, block_id: int) -> Any:
        return super().block(block_id % POOL)


class Streams:
    """Streams of an engine, and the gaps between their tokens."""

    def __init__(self, model: str, count: int):
        parts = assemble(WorkerSettings(role="decode", model=model, kv_cache_gib=1.0))
        warm_up(parts.engine)
        self.block_size = parts.engine.config.block_size
        self.block_bytes = int(parts.kv[0].numel() * parts.kv.element_size())
        self.gaps: list[float] = []
        self._last: dict[str, float] = {}
        self._loop = EngineLoop(parts.engine, self._record_gaps)
        self._loop.start()
        for number in range(count):
            self._begin(f"stream {number}")

    def _begin(self, name: str) -> None:
        prompt = tuple(random.Random(name).choices(range(1000), k=64))
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        job = Job(name, 0, prompt, len(prompt), Generate(params), "router")
        self._loop.submit(lambda engine: engine.add(job))

    def _record_gaps(self, events: Sequence[Any]) -> None:
        now = time.perf_counter()
        for event in events:
            if not isinstance(event, Generated):
                continue
            name = event.key[0]
            if name in self._last:
                self.gaps.append(now - self._last[name])
            self._last[name] = now
            if event.delta.finish_reason:
                del self._last[name]
                self._begin(f"{name}'")


class Grants:
    """Grants as many blocks as a job has."""

    def __init__(self, block_size: int):
        self.receiver: Receiver
        self._block_size = block_size

    def reserve(self, key: Any, options: GrantPurpose) -> None:
        assert isinstance(options, Job)
        self.receiver.granted(key, 0, range(len(options.token_ids) // self._block_size))

    def ready(self, key: Any, commit: Commit) -> None: ...

    def failed(self, key: Any, error: Exception) -> None:
        raise error

    def quiet(self, key: Any) -> None: ...


def decode(pipe: Connection, model: str, count: int) -> None:
    """Run a decode node's engine and link in a child process; report the gaps since the last request on demand."""
    streams = Streams(model, count)
    link = UcxLink("127.0.0.1", prepare=lambda: lower_priority(LINK_NICENESS))
    dock, grants = Dock(link, ReusedMemory(POOL, streams.block_bytes)), Grants(streams.block_size)
    grants.receiver = Receiver(dock, grants, 1, "bench")
    dock.start()
    pipe.send((link.address, streams.block_size, streams.block_bytes))
    while pipe.recv():
        gaps, streams.gaps = streams.gaps, []
        pipe.send(gaps)


def percentile(gaps: Sequence[float], share: float) -> float:
    """Return the quantile in milliseconds."""
    return 1e3 * sorted(gaps)[min(len(gaps) - 1, int(share * len(gaps)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt whose blocks are shipped")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="ships, each between two turns without")
    options = parser.parse_args()
    ours, theirs = mp.get_context("spawn").Pipe()
    child = mp.get_context("spawn").Process(target=decode, args=(theirs, options.model, options.streams), daemon=True)
    child.start()
    os.nice(PREFILL_NICENESS)
    address, block_size, block_bytes = ours.recv()
    blocks, outcomes = options.tokens // block_size, Outcomes()
    dock = Dock(UcxLink("127.0.0.1"), ReusedMemory(POOL, block_bytes))
    sender = Sender(dock, outcomes)
    dock.start()
    target = DecodeTarget("decode", 1, address, "bench")

    def gaps() -> list[float]:
        ours.send(True)
        return ours.recv()  # type: ignore[no-any-return]

    try:
        ship(sender, outcomes, target, POOL, block_size)
        took: list[float] = []
        alone: list[list[float]] = []
        landing: list[list[float]] = []
        for _ in range(options.rounds):
            gaps()
            time.sleep(max([3.0, *took]))
            alone.append(gaps())
            took.append(ship(sender, outcomes, target, blocks, block_size))
            landing.append(gaps())
    finally:
        dock.stop()
        child.kill()
        child.join()
    print(f"{blocks} blocks of {block_bytes >> 10} KiB took {statistics.median(took):.1f} s")
    print("| streams | tokens | p50 ms | p95 ms | p99 ms | longest ms |\n| --- | --- | --- | --- | --- | --- |")
    for what, rounds in (("alone", alone), ("while blocks land", landing)):
        every = [gap for gaps in rounds for gap in gaps]
        figures = " | ".join(f"{percentile(every, share):.0f}" for share in (0.5, 0.95, 0.99, 1.0))
        print(f"| {what} | {len(every)} | {figures} |")
    ratio = statistics.median(
        percentile(ship_gaps, 0.99) / percentile(own, 0.99) for own, ship_gaps in zip(alone, landing, strict=True)
    )
    print(f"p99 is {ratio:.2f} times that of streams alone")


if __name__ == "__main__":
    main()
