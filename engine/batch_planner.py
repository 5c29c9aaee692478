"""Batch plans on the host, updated in place from step to step while the same requests decode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.lora import Adapted, Adapter

SPARE_BLOCKS = 8
"""Spare columns of a cached block table: it is rebuilt once in that many blocks."""


class BatchPlanner:
    """Planner of one runner's steps.

    Its result is valid until the next call, which may change its arrays: a batch that decodes again reuses the same
    objects."""

    def __init__(self, block_size: int, staging: Staging) -> None:
        self._block_size = block_size
        self._staging = staging
        self._decodes: _Decodes | None = None

    def plan(self, slices: Sequence[Slice], behind: Sequence[int] | None = None) -> tuple[torch.Tensor, BatchPlan]:
        """Return the token ids int64 [T] of a batch, and its plan. Slices with one token come first.

        behind: numbers in place of the ids of decodes whose tokens are not known yet."""
        kept = self._decodes
        if any(s.drafts for s in slices):
            self._decodes = None
            return self._drafted(slices)
        if kept is not None and kept.follows(slices):
            kept.advance(behind)
        elif slices[-1].decodes:
            self._decodes = kept = _Decodes(slices, self._block_size, self._staging, behind)
        else:
            self._decodes = None
            return build_plan(slices, self._block_size, self._staging)
        return kept.plan()

    def _drafted(self, slices: Sequence[Slice]) -> tuple[torch.Tensor, BatchPlan]:
        """Plan decodes alone: each draft is one more decode after that of the token before it."""
        rows = [(s.request, s.start + i) for s in slices for i in range(1 + len(s.drafts))]
        token_ids = [token for s in slices for token in (s.request.token_ids[s.start], *s.drafts)]
        parts = [Part(request.block_ids, position, 1) for request, position in rows]
        adapted = by_adapter([request for request, _ in rows])
        return lay_out(token_ids, parts, self._block_size, self._staging, adapted, chained=True)


class _Decodes:
    """Host arrays of a batch of decodes, advanced in place.

    A request's chain of blocks changes only when a block becomes full: the chain grows, or the full block is replaced
    by an equal one. The next token is then the first of its block, which is when its row of the table is read again;
    after a step that was planned before that, at the second token."""

    def __init__(
        self, slices: Sequence[Slice], block_size: int, staging: Staging, behind: Sequence[int] | None = None
    ) -> None:
        self._behind = behind
        self._requests: list[Request] = [s.request for s in slices]
        self._starts = [s.start for s in slices]
        self._block_size = block_size
        self._staging = staging
        count, width = len(slices), max(len(s.request.block_ids) for s in slices) + SPARE_BLOCKS
        self._table = np.zeros((count, width), dtype=np.int32)
        ids, positions, slots = np.empty((3, count), dtype=np.int64)
        query_start, total_len = np.arange(count + 1, dtype=np.int32), np.empty(count, dtype=np.int32)
        adapted = adapted_tokens(slices)
        self._adapters = tuple(adapted)
        own: list[np.ndarray] = [ids, positions, slots, self._table, query_start, total_len]
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
        late = self._behind is not None
        self._behind = behind
        for row in range(len(self._starts)):
            self._starts[row] += 1
            if self._starts[row] % self._block_size <= late:
                self._read_blocks(row)
            self._write(row)

    def plan(self) -> tuple[torch.Tensor, BatchPlan]:
        tensors = self._tensors if self._staging.direct else self._staging.put(self._arrays)
        token_ids, positions, slots, table, query_start, total_len, *adapted = tensors
        return token_ids, BatchPlan(
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

    def _read_blocks(self, row: int) -> None:
        block_ids = self._requests[row].block_ids
        self._table[row, : len(block_ids)] = block_ids

    def _write(self, row: int) -> None:
        """Write a row through memoryviews: after a step that read all weights, NumPy's code is cold in the caches."""
        request, start = self._requests[row], self._starts[row]
        block, offset = divmod(start, self._block_size)
        ids, positions, slots, total_len = self._views
        ids[row] = request.token_ids[start] if self._behind is None else self._behind[row]
        positions[row], total_len[row] = start, start + 1
        slots[row] = request.block_ids[block] * self._block_size + offset


def build_plan(slices: Sequence[Slice], block_size: int, staging: Staging) -> tuple[torch.Tensor, BatchPlan]:
    """Return token ids and plan of any batch in new arrays. Slices with one token come first."""
    parts = [Part(s.request.block_ids, s.start, s.count) for s in slices]
    token_ids = [token for s in slices for token in s.request.token_ids[s.start : s.start + s.count]]
    ends = accumulate(s.count for s in slices)
    drawing = [end - 1 for s, end in zip(slices, ends, strict=True) if s.draws]
    return lay_out(token_ids, parts, block_size, staging, adapted_tokens(slices), drawing=drawing)


@dataclass(frozen=True, slots=True)
class Part:
    """`count` tokens from `start` on of a sequence whose K/V is in this chain of blocks."""

    block_ids: Sequence[int]
    start: int
    count: int


def lay_out(
    token_ids: Sequence[int],
    parts: Sequence[Part],
    block_size: int,
    staging: Staging,
    adapted: Mapping[Adapter, np.ndarray] | None = None,
    *,
    drawing: Sequence[int] | None = None,
    chained: bool = False,
) -> tuple[torch.Tensor, BatchPlan]:
    """Return the token ids int64 [T] and the plan of a batch of these parts. Parts with one token come first.

    adapted: from `by_adapter`. drawing, chained: see BatchPlan."""
    tables = [np.asarray(p.block_ids, dtype=np.int32) for p in parts]
    table = np.zeros((len(parts), max(map(len, tables))), dtype=np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    positions = np.concatenate([np.arange(p.start, p.start + p.count, dtype=np.int64) for p in parts])
    sequence = np.repeat(np.arange(len(parts)), [p.count for p in parts])
    slots = table[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    query_lens = tuple(p.count for p in parts)
    total_lens = tuple(p.start + p.count for p in parts)
    query_start, total_len = np.cumsum([0, *query_lens], dtype=np.int32), np.asarray(total_lens, dtype=np.int32)
    ids, chosen, tokens = np.asarray(token_ids, np.int64), np.asarray(drawing or (), np.int64), dict(adapted or {})
    arrays = (ids, positions, slots, table, query_start, total_len, chosen, *tokens.values())
    on_device = staging.put(arrays)
    return on_device[0], BatchPlan(
        positions=on_device[1],
        slots=on_device[2],
        block_table=on_device[3],
        query_start=on_device[4],
        total_len=on_device[5],
        query_lens=query_lens,
        total_lens=total_lens,
        num_decodes=sum(p.count == 1 for p in parts),
        block_size=block_size,
        adapted=tuple(map(Adapted, tokens, on_device[7:])),
        chained=chained,
        drawing=None if drawing is None else on_device[6],
    )


def adapted_tokens(slices: Sequence[Slice]) -> Mapping[Adapter, np.ndarray]:
    """Return which tokens of the batch use which adapter."""
    adapted = any(s.request.adapter is not None for s in slices)
    return by_adapter([s.request for s in slices for _ in range(s.count)]) if adapted else {}


def by_adapter(owners: Sequence[Request]) -> Mapping[Adapter, np.ndarray]:
    """Return the tokens of a batch, int64 [n], by the adapter of the request that each is of."""
    tokens: defaultdict[Adapter, list[int]] = defaultdict(list)
    for index, request in enumerate(owners):
        if request.adapter is not None:
            tokens[request.adapter].append(index)
    return {adapter: np.asarray(rows, np.int64) for adapter, rows in tokens.items()}
