"""DecodeBatch: host arrays of a batch of decodes, advanced in place from step to step, and the BatchPlan over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.engine.window_blocks import WindowTables
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.lora import Adapted, Adapter

SPARE_BLOCKS = 8
"""Spare columns of a cached block table, which is rebuilt once per SPARE_BLOCKS new blocks of a request."""


class DecodeBatch:
    """Host arrays of a batch of decodes, advanced in place.

    A request's chain of blocks grows when a block becomes full. The next token is then the first of its block, which is
    when its row of the table is read again; after a step that was planned before that, at the second token. The row is
    also read again after blocks were replaced by equal ones, which may be many after a prompt has arrived."""

    def __init__(
        self,
        slices: Sequence[Slice],
        block_size: int,
        staging: Staging,
        behind: Sequence[int] | None = None,
        groups: int = 0,
    ) -> None:
        self._behind = behind
        self._requests: list[Request] = [s.request for s in slices]
        self._starts = [s.start for s in slices]
        self._replacements = [s.request.replacements for s in slices]
        self._block_size = block_size
        self._staging = staging
        count, width = len(slices), max(len(s.request.block_ids) for s in slices) + SPARE_BLOCKS
        self._table = np.zeros((count, width), dtype=np.int32)
        ids, positions, slots = np.empty((3, count), dtype=np.int64)
        query_start, total_len = np.arange(count + 1, dtype=np.int32), np.empty(count, dtype=np.int32)
        adapted = adapted_tokens(slices)
        self._adapters = tuple(adapted)
        self._windows = WindowTables(groups, count, width, block_size) if groups else None
        own: list[np.ndarray] = [ids, positions, slots, self._table, query_start, total_len]
        if self._windows is not None:
            own += self._windows.arrays
        self._arrays = [*own, *adapted.values()]
        self._tensors = tuple(map(torch.from_numpy, self._arrays))
        self._views = (ids.data, positions.data, slots.data, total_len.data)
        self._query_lens = (1,) * count
        self._chained = len(set(map(id, self._requests))) < count
        for row in range(count):
            self._read_blocks(row)
            self._write(row)

    def follows(self, slices: Sequence[Slice]) -> bool:
        """Return whether the slices are this batch's next tokens and its table has room for their blocks."""
        width = self._table.shape[1]
        return len(slices) == len(self._requests) and all(
            s.request is request and s.start == start + 1 and s.decodes and len(request.block_ids) <= width
            for s, request, start in zip(slices, self._requests, self._starts, strict=True)
        )

    def advance(self, behind: Sequence[int] | None = None) -> None:
        """Move on to the batch's next tokens. behind: see BatchPlanner.plan."""
        late = self._behind is not None
        self._behind = behind
        for row in range(len(self._starts)):
            self._starts[row] += 1
            replaced = self._requests[row].replacements != self._replacements[row]
            if replaced or self._starts[row] % self._block_size <= late:
                self._read_blocks(row)
            self._write(row)

    def plan(self) -> tuple[torch.Tensor, BatchPlan]:
        """Return the token ids int64 [T] and the plan, valid until the batch advances."""
        tensors = self._tensors if self._staging.direct else self._staging.put(self._arrays)
        token_ids, positions, slots, table, query_start, total_len, *adapted = tensors
        windows = [adapted.pop(0), adapted.pop(0)] if self._windows is not None else []
        plan = BatchPlan(
            positions=positions,
            slots=slots,
            block_table=table,
            query_start=query_start,
            total_len=total_len,
            query_lens=self._query_lens,
            total_lens=tuple(start + 1 for start in self._starts),
            num_decodes=len(self._starts),
            block_size=self._block_size,
            adapted=tuple(map(Adapted, self._adapters, adapted)),
            chained=self._chained,
        )
        return token_ids, plan.with_windows(*windows) if windows else plan

    def _read_blocks(self, row: int) -> None:
        block_ids = self._requests[row].block_ids
        self._replacements[row] = self._requests[row].replacements
        self._table[row, : len(block_ids)] = block_ids
        if self._windows is not None:
            self._windows.read(row, self._requests[row].windows)

    def _write(self, row: int) -> None:
        """Write a row through memoryviews: after a step that read all weights, NumPy's code is cold in the caches."""
        request, start = self._requests[row], self._starts[row]
        block, offset = divmod(start, self._block_size)
        ids, positions, slots, total_len = self._views
        ids[row] = request.token_ids[start] if self._behind is None else self._behind[row]
        positions[row], total_len[row] = start, start + 1
        slots[row] = request.block_ids[block] * self._block_size + offset
        if self._windows is not None:
            self._windows.write(row, start)


def adapted_tokens(slices: Sequence[Slice]) -> Mapping[Adapter, np.ndarray]:
    """Return which tokens of the batch use which adapter."""
    adapted = any(s.request.adapter is not None for s in slices)
    return by_adapter([s.request for s in slices for _ in range(s.count)]) if adapted else {}


def by_adapter(owners: Sequence[Request]) -> Mapping[Adapter, np.ndarray]:
    """Return the indices of a batch's tokens, int64 [n], by the adapter of each token's request."""
    tokens: defaultdict[Adapter, list[int]] = defaultdict(list)
    for index, request in enumerate(owners):
        if request.adapter is not None:
            tokens[request.adapter].append(index)
    return {adapter: np.asarray(rows, np.int64) for adapter, rows in tokens.items()}
