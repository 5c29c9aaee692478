"""Ranks of one decoder, each on a thread of this process, in place of processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.models import load_model
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

    def __init__(self, path: Path, ranks: int, *, room: int = 1 << 12, ops: type[Ops] = ReferenceOps, **load: Any):
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
            load_model(source, device=CPU, ops=ops(), part=Part(group), **options) for group in groups
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
