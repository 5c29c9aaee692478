"""A model made of checksums: what a token's place in the cache holds depends on every token before it, as K and V do,
and the next token on all that is read back, so a block that somebody else wrote changes the output."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.inflight_step import Launch
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Computing, ModelInfo
from kvferry.engine.sampler import Sampled
from kvferry.engine.step_slices import Slice
from kvferry.kv_transfer.ports import BlockMemory

VOCAB = 211
BLOCK_SIZE = 4
FINGERPRINT = "arithmetic"
INFO = ModelInfo("arithmetic", "1", 1, 1, 1, VOCAB, 256)


def place(token: int, state: int) -> int:
    """What is kept for a token behind others."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def read(kept: int, state: int) -> int:
    """The state of who has read one place more."""
    return zlib.crc32(kept.to_bytes(4, "little"), state)


@functools.cache
def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Its right continuation."""
    tokens, state = list(prompt), 0
    for at in range(len(prompt) + count - 1):
        state = read(place(tokens[at], state), state)
        if at + 1 == len(tokens):
            tokens.append(state % VOCAB)
    return tuple(tokens[len(prompt) :])


class Arithmetic(BlockMemory):
    """An engine's runner (`engine.runner.StepRunner`), and its blocks as a link sees them. left: attempts that were
    cancelled, by request; blame: told of what must not be."""

    launch: Launch | None = None

    def __init__(self, num_blocks: int) -> None:
        self.waited_s = 0.0
        self.masks = GrammarMasks.none("arithmetic reads no grammars")
        self.model = cast(Computing, SimpleNamespace(info=INFO, device=torch.device("cpu"), resumable=False))
        self.memory = np.zeros((num_blocks, BLOCK_SIZE), dtype="<u4")
        self._bytes = self.memory.view(np.uint8)
        self.left: dict[str, int] = {}
        self.blame: Callable[[str], None] = print

    def hurry(self) -> None:
        pass

    def block(self, block_id: int) -> np.ndarray:
        return self._bytes[block_id]

    def id_of(self, buffer: np.ndarray) -> int:
        """The block that a view from `block` shows."""
        return (buffer.ctypes.data - self.memory.ctypes.data) // self._bytes.shape[1]

    def copy_block(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]

    def run(self, slices: Sequence[Slice], wanted: object = None, halfway: object = None) -> list[Sampled | None]:
        return [self._one(part) for part in slices]

    def _one(self, part: Slice) -> Sampled | None:
        request, end = part.request, part.start + part.count
        if self.left.get(request.key[0], -1) >= request.key[1]:
            self.blame(f"{request.key} is computed, but was cancelled")
        table = request.block_ids
        state = zlib.crc32(self.memory[table].tobytes()[: part.start * 4])
        for at in range(part.start, end):
            kept = place(request.token_ids[at], state)
            self.memory[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = kept
            state = read(kept, state)
        return Sampled(state % VOCAB, None) if part.samples else None


def make_engine(num_blocks: int, budget: int, seqs: int) -> Engine:
    runner = Arithmetic(num_blocks)
    config = EngineConfig(FINGERPRINT, BLOCK_SIZE, 200, Limits(budget, max(1, budget // 2), seqs))
    return Engine(config, runner, BlockPool(num_blocks, Ledger(num_blocks)))
