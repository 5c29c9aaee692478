"""Ranks of one decoder, each on a thread of this process, in place of processes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.engine.ranks.calls import follow
from kvferry.engine.ranks.device_group import DeviceGroup
from kvferry.engine.ranks.group import Group
from kvferry.engine.ranks.rank_assignment import RankAssignment
from kvferry.engine.ranks.rank_worker import RankWorker
from kvferry.engine.ranks.rendezvous import FileRendezvous
from kvferry.engine.ranks.sharded_model import ShardedModel
from kvferry.engine.ranks.shared_group import NUM_BUFFERS, SharedGroup
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.engine.tiny_models import OURS, Cache, tokens_for

CPU = torch.device("cpu")
WAIT_S = 30.0
DIVISIBLE = [name for name in OURS if not name.startswith(("gemma3n", "gemma4")) and name != "gemma"]
"""Tiny families that two ranks can share: no layers of different shapes, and no single K/V head."""


def connected(ranks: int) -> list[DeviceGroup]:
    """Groups over gloo, to be closed."""
    meeting = os.memfd_create("meeting")
    groups = [DeviceGroup(rank, ranks, CPU, FileRendezvous(os.dup(meeting))) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(DeviceGroup.connect, groups))
    os.close(meeting)
    return groups


class Threads:
    """The ranks' memory, meetings and messages. `pools` are set before the first step: of each rank its own where they
    are apart, as on GPUs, or the one that all share. A rank that ends has all others fail at their next meeting."""

    def __init__(
        self,
        path: Path,
        ranks: int,
        *,
        room: int = 1 << 12,
        ops: Callable[[], Ops] = ReferenceOps,
        whole_experts: bool = False,
        apart: bool = False,
        **load: Any,
    ):
        self._barrier = threading.Barrier(ranks)
        self._inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(ranks - 1)]
        self.said: list[bytes] = []
        self.errors: list[BaseException] = []
        self.pools: list[torch.Tensor] = []
        self.apart = apart
        self.groups = groups = list[Group](connected(ranks)) if apart else self._sharing(ranks, room)
        source = resolve(str(path))
        options: dict[str, Any] = {"dtype": torch.float32, "impl": "kvferry"} | load
        self.decoders: list[Any] = [
            load_model(source, device=CPU, ops=ops(), part=RankAssignment(group, whole_experts), **options)
            for group in groups
        ]
        self.model = ShardedModel(self.decoders[0], groups[0], self._send)
        self.others = [RankWorker(decoder, group) for decoder, group in zip(self.decoders[1:], groups[1:], strict=True)]
        self._threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, ranks)]

    def _sharing(self, ranks: int, room: int) -> list[Group]:
        places = torch.zeros(NUM_BUFFERS, ranks, room)
        return [SharedGroup(rank, places, self._meet) for rank in range(ranks)]

    def _meet(self) -> None:
        self._barrier.wait(WAIT_S)

    def _send(self, message: bytes) -> None:
        self.said.append(message)
        for inbox in self._inboxes:
            inbox.put(message)

    def _follow(self, rank: int) -> None:
        first = self._hear(rank)  # by which time the pool is there
        waiting = [first]

        def receive() -> bytes:
            return waiting.pop() if waiting else self._hear(rank)

        try:
            follow(self.others[rank - 1], self.pools[rank], receive)
        except EOFError:
            return
        except BaseException as error:
            self.errors.append(error)
            self._barrier.abort()

    def _hear(self, rank: int) -> bytes:
        message = self._inboxes[rank - 1].get()
        if not message:
            raise EOFError
        return message

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._send(b"")
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for group in self.groups:
            if isinstance(group, DeviceGroup):
                group.close()


@contextmanager
def joined_ranks(path: Path, ranks: int, **options: Any) -> Iterator[Threads]:
    """Running ranks of the model at `path`; what a rank raised is raised here."""
    threads = Threads(path, ranks, **options)
    threads.start()
    try:
        yield threads
    finally:
        threads.end()
    for error in threads.errors:
        raise error


def whole(path: Path, ops: type[Ops] = ReferenceOps, **options: Any) -> Model:
    given: dict[str, Any] = {"dtype": torch.float32, "impl": "kvferry"} | options
    return load_model(resolve(str(path)), device=CPU, ops=ops(), **given)


class Pooled(Cache):
    """A cache whose pool the ranks of a model have; `kv` is the first rank's."""

    def __init__(self, ranks: Threads) -> None:
        super().__init__(ranks.model)
        count = ranks.model.ranks
        own = ranks.model.info.layout(self.kv.dtype, self.kv.shape[-2]).of_rank(count).block_shape
        self.pools = ranks.pools = [self.kv] * count
        if ranks.apart:
            self.pools[:] = [torch.full((len(self.kv), *own), 1e4, dtype=self.kv.dtype) for _ in range(count)]
            self.kv = self.pools[0]

    @property
    def whole(self) -> torch.Tensor:
        """What a node of one rank has."""
        if self.pools[-1] is self.kv:
            return self.kv
        if self.kv.shape[2] == 1:
            assert all(torch.equal(each, self.kv) for each in self.pools), "each rank has what all heads share"
            return self.kv
        return torch.cat(self.pools, 3)


def expect_equal(ranks: Threads, model: Model, tolerance: float = 1e-4) -> Pooled:
    """Chunks, decodes, and both in one batch; and the same bytes in the same places of the pool, which is returned."""
    tokens, other = tokens_for(45, 1), tokens_for(19, 2)
    ours, theirs = Pooled(ranks), Cache(model)
    for first, second in ((16, 14), (7, 1), (20, 1), (1, 1), (1, 2)):
        batch = dict(sorted({"a": tokens[:first], "b": other[:second]}.items(), key=lambda each: len(each[1]) > 1))
        tokens, other = tokens[first:], other[second:]
        for found, wanted in zip(ours.step(batch), theirs.step(batch), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.whole, theirs.kv, rtol=tolerance, atol=tolerance)
    return ours
