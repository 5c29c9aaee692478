"""Measures the cost of checksums: whole ships between two processes over the real link, verified and not.

    python -m benchmarks.ships [--ships 40] [--mib 64]

A ship's time is from its first block to decode's acknowledgement; both kinds alternate. The goal: verified ships keep
80 % of the bandwidth of the others. The fastest tenth is more reliable on a machine with other load."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.receiver import Receiver
from kvferry.kv_transfer.sender import Sender
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.link_messages import Commit, GrantPurpose
from kvferry.protocol.messages import DecodeTarget, Job, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate

BLOCK_BYTES = (48 << 10, 360 << 10, 1 << 20)
LIMIT_S = 60.0


class Memory(BlockMemory):
    """Blocks with random bytes, all of them touched."""

    def __init__(self, blocks: int, size: int):
        self._blocks = np.random.default_rng(0).integers(0, 256, (blocks, size), dtype=np.uint8)

    def block(self, block_id: int) -> Any:
        return self._blocks[block_id]


class Grants:
    """Grants everything at once."""

    def __init__(self, blocks: int):
        self.receiver: Receiver
        self._blocks = blocks

    def reserve(self, key: Any, options: GrantPurpose) -> None:
        self.receiver.granted(key, 0, range(self._blocks))

    def ready(self, key: Any, commit: Commit) -> None: ...

    def failed(self, key: Any, error: Exception) -> None:
        raise error

    def quiet(self, key: Any) -> None: ...


class Outcomes:
    """Outcomes of the offered ships."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def sent(self, transfer: int) -> None: ...

    def granted(self, transfer: int, first_block: int) -> None:
        self.queue.put("granted")

    def done(self, transfer: int, stats: Any) -> None:
        self.queue.put("done")

    def failed(self, transfer: int, error: Exception) -> None:
        self.queue.put(error)

    def quiet(self, transfer: int) -> None:
        self.queue.put("quiet")

    def expect(self, news: str) -> None:
        """Wait for an outcome. Raises RuntimeError for another one."""
        if (outcome := self.queue.get(timeout=LIMIT_S)) != news:
            raise RuntimeError(f"{outcome!r} came instead of {news}")


def receive(pipe: Connection, blocks: int, size: int, verify: float) -> None:
    """Run a decode node's side in a child process until anything arrives over the pipe."""
    link = UcxLink("127.0.0.1")
    dock, grants = Dock(link, Memory(blocks, size), verify=verify), Grants(blocks)
    grants.receiver = Receiver(dock, grants, 1, "bench")
    dock.start()
    pipe.send(link.address)
    pipe.recv()
    dock.stop()


@contextmanager
def shipping(blocks: int, size: int, verify: float) -> Iterator[Callable[[], float]]:
    """Yield a function that ships all blocks to another process and returns the seconds."""
    ours, theirs = mp.get_context("spawn").Pipe()
    child = mp.get_context("spawn").Process(target=receive, args=(theirs, blocks, size, verify), daemon=True)
    child.start()
    outcomes = Outcomes()
    dock = Dock(UcxLink("127.0.0.1"), Memory(blocks, size), verify=verify)
    sender = Sender(dock, outcomes)
    dock.start()
    try:
        target = DecodeTarget("decode", 1, ours.recv(), "bench")
        yield lambda: ship(sender, outcomes, target, blocks)
    finally:
        dock.stop()
        child.kill()
        child.join()


def ship(sender: Sender, outcomes: Outcomes, target: DecodeTarget, blocks: int, block_size: int = 16) -> float:
    """Return the seconds from the first block to the acknowledgement."""
    tokens = tuple(range(blocks * block_size))
    transfer = sender.offer(target, Job("request", 1, tokens, len(tokens), Generate(SamplingParams()), "router"))
    outcomes.expect("granted")
    began = time.perf_counter()
    sender.ship(transfer, [(index, index) for index in range(blocks)])
    sender.commit(transfer, TokenDelta("request", 1, 0, (7,)))
    outcomes.expect("done")
    taken = time.perf_counter() - began
    outcomes.expect("quiet")
    return taken


def compare(blocks: int, size: int, ships: int) -> list[tuple[float, float]]:
    """Return seconds of ships without and with checksums, in alternating order; the first of each do not count."""
    with shipping(blocks, size, 0.0) as plain, shipping(blocks, size, 1.0) as checked:
        taken = []
        for number in range(ships + 2):
            if number % 2:
                verified = checked()
                taken.append((plain(), verified))
            else:
                taken.append((plain(), checked()))
    return taken[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ships", type=int, default=40, help="of each kind and size")
    parser.add_argument("--mib", type=int, default=64, help="size of a ship")
    options = parser.parse_args()
    print("| block | unverified GB/s | verified GB/s | verified / unverified | of the best tenth |")
    print("| --- | --- | --- | --- | --- |")
    for size in BLOCK_BYTES:
        blocks = (options.mib << 20) // size
        taken = compare(blocks, size, options.ships)
        plain, verified = (blocks * size / statistics.median(times) / 1e9 for times in zip(*taken, strict=True))
        ratio = statistics.median(without / checked for without, checked in taken)
        best = [sorted(times)[len(times) // 10] for times in zip(*taken, strict=True)]
        print(
            f"| {size >> 10} KiB | {plain:.2f} | {verified:.2f} | {ratio:.2f} | {best[0] / best[1]:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
