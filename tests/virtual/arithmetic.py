"""A model made of checksums: what a token's place in the cache holds depends on every token before it, as K and V do,
and the next token on all that is read back, so a block that somebody else wrote changes the output."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS
from kvferry.engine.step_slices import Slice
from kvferry.engine.window_blocks import WindowBlocks
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.protocol.attention_window import first_seen
from kvferry.protocol.layer_groups import LayerGroups

VOCAB = 211
STATE_FLOATS, FILLED = 7, [3, 1, 4, 1, 5]
"""Numbers of a recurrent state, two blocks, and those behind its value."""
BLOCK_SIZE = 4
FINGERPRINT = "arithmetic"
INFO = ModelInfo("arithmetic", "1", 1, 1, 1, VOCAB, 256)
WINDOW, MARKS = 6, (0x55555555, 0x33333333)
"""Of two layers with windows, and how what each keeps of a token differs from what the layer without one keeps."""
WINDOWED = replace(INFO, groups=LayerGroups((WINDOW, 0, WINDOW)))


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
    cancelled, by request; blame: told of what must not be. states: requests that can have a recurrent state, which is
    what the places read so far amount to; 0: the model has none. info: `WINDOWED` for layers with windows, too."""

    launch: Launch | None = None

    def __init__(self, num_blocks: int, states: int = 0, info: ModelInfo = INFO) -> None:
        self.waited_s = 0.0
        self.masks = GrammarMasks.none("arithmetic reads no grammars")
        self.model = cast(Computing, SimpleNamespace(info=info, device=torch.device("cpu"), resumable=False))
        self.memory = np.zeros((num_blocks, BLOCK_SIZE), dtype="<u4")
        self._bytes = self.memory.view(np.uint8)
        kv, rows = torch.from_numpy(self.memory.view("<i4")), ROWS * states
        self.states = StateMemory(make_rows(rows, STATE_FLOATS, kv.device), kv) if states else None
        self.left: dict[str, int] = {}
        self.blame: Callable[[str], None] = print

    def mark_urgent(self) -> None:
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
        if self.states is not None:
            state = self._remembered(part, state)
        pages = request.windows
        if pages is not None:
            state ^= self._other_windows(table, pages, range(first_seen(part.start, WINDOW), part.start))
        for at in range(part.start, end):
            kept = place(request.token_ids[at], state)
            self.memory[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = kept
            for mark, ids in zip(MARKS, pages.groups if pages is not None else (), strict=False):
                self.memory[ids[at // BLOCK_SIZE - pages.first], at % BLOCK_SIZE] = kept ^ mark
            state = read(kept, state)
        if self.states is not None and request.state_rows is not None:
            self.states.rows[request.state_rows.spare[0]] = torch.tensor([state >> 16, state & 0xFFFF, *FILLED]).float()
        return Sampled(state % VOCAB, None) if part.samples else None

    def _other_windows(self, table: list[int], pages: WindowBlocks, seen: range) -> bool:
        """Whether a layer with a window reads back something else than the layer without one."""
        assert pages.first * BLOCK_SIZE <= seen.start
        return any(
            self.memory[ids[at // BLOCK_SIZE - pages.first], at % BLOCK_SIZE] ^ mark
            != self.memory[table[at // BLOCK_SIZE], at % BLOCK_SIZE]
            for mark, ids in zip(MARKS, pages.groups, strict=True)
            for at in seen
        )

    def _remembered(self, part: Slice, state: int) -> int:
        """What the request's recurrent state says; another number where that is not the state of its places."""
        rows = part.request.state_rows
        assert rows is not None
        assert self.states is not None
        if rows.before < 0:
            return state if part.start == 0 else state ^ 1
        high, low, *filled = map(int, self.states.rows[rows.before].tolist())
        return high << 16 | low if filled == FILLED else state ^ 1


def make_engine(num_blocks: int, budget: int, seqs: int, *, recurrent: bool = False, windowed: bool = False) -> Engine:
    runner = Arithmetic(num_blocks, seqs + 1 if recurrent else 0, WINDOWED if windowed else INFO)
    config = EngineConfig(FINGERPRINT, BLOCK_SIZE, 200, Limits(budget, max(1, budget // 2), seqs), state_stride=4)
    return Engine(config, runner, BlockPool(num_blocks, Ledger(num_blocks)))
