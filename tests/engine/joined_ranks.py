"""Ranks of one decoder, each on a thread of this process, in place of processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_models import Cache, tokens_for

from engine.models import load_model
from engine.models.base import Model
from engine.ranks.calls import follow
from engine.ranks.group import TURNS, Group
from engine.ranks.led import Led, own_heads
from engine.ranks.part import Part
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from model_files.source import resolve

CPU = torch.device("cpu")
PATIENCE_S = 30.0


class Threads:
    """The ranks' memory, meetings and messages. `kv` is set before the first step. A rank that ends has all others
    fail at their next meeting."""

    def __init__(
        self,
        path: Path,
        ranks: int,
        *,
        room: int = 1 << 12,
        ops: type[Ops] = ReferenceOps,
        whole_experts: bool = False,
        **load: Any,
    ):
        self._barrier = threading.Barrier(ranks)
        places = torch.zeros(TURNS, ranks, room)
        self._inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(ranks - 1)]
        self.said: list[bytes] = []
        self.errors: list[BaseException] = []
        self.kv = torch.empty(0)
        groups = [Group(rank, places, lambda: self._barrier.wait(PATIENCE_S) and None) for rank in range(ranks)]
        source = resolve(str(path))
        options: dict[str, Any] = {"dtype": torch.float32, "impl": "kvferry"} | load
        self.decoders: list[Any] = [
            load_model(source, device=CPU, ops=ops(), part=Part(group, whole_experts), **options) for group in groups
        ]
        self.model = Led(self.decoders[0], groups[0], self._tell)
        self._threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, ranks)]

    def _tell(self, message: bytes) -> None:
        self.said.append(message)
        for inbox in self._inboxes:
            inbox.put(message)

    def _follow(self, rank: int) -> None:
        first = self._hear(rank)  # by which time the pool is there
        waiting = [first]

        def hear() -> bytes:
            return waiting.pop() if waiting else self._hear(rank)

        try:
            follow(self.decoders[rank], own_heads(self.kv, self.decoders[rank], rank), hear)
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
        self._tell(b"")
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


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
    given = {"dtype": torch.float32, "impl": "kvferry"} | options
    return load_model(resolve(str(path)), device=CPU, ops=ops(), **given)


class Pooled(Cache):
    """A cache whose pool the ranks of a model have."""

    def __init__(self, ranks: Threads) -> None:
        super().__init__(ranks.model)
        ranks.kv = self.kv


def expect_equal(ranks: Threads, model: Model, tolerance: float = 1e-4) -> Pooled:
    """Chunks, decodes, and both in one batch; and the same bytes in the same places of the pool, which is returned."""
    tokens, other = tokens_for(45, 1), tokens_for(19, 2)
    ours, theirs = Pooled(ranks), Cache(model)
    for first, second in ((16, 14), (7, 1), (20, 1), (1, 1), (1, 2)):
        batch = dict(sorted({"a": tokens[:first], "b": other[:second]}.items(), key=lambda each: len(each[1]) > 1))
        tokens, other = tokens[first:], other[second:]
        for found, wanted in zip(ours.step(batch), theirs.step(batch), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.kv, theirs.kv, rtol=tolerance, atol=tolerance)
    return ours
