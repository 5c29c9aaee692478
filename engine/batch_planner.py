"""Builds the token ids and the BatchPlan of a step on the host; reuses its arrays while the same requests decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from kvferry.engine.decode_batch import DecodeBatch, adapted_tokens, by_adapter
from kvferry.engine.media.media_inputs import MediaInputs
from kvferry.engine.state_inputs import StateInputs
from kvferry.engine.step_slices import Slice
from kvferry.engine.window_blocks import WindowBlocks, WindowTables
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.input_staging import Staging
from kvferry.kernels.lora import Adapted, Adapter


class BatchPlanner:
    """Planner of one runner's steps.

    Its result is valid until the next call, which may change its arrays: a batch that decodes again reuses the same
    objects. states: None for a model without recurrent layers. media: None: no batch has any. groups: of layers with
    windows that have blocks of their own."""

    def __init__(
        self,
        block_size: int,
        staging: Staging,
        states: StateInputs | None = None,
        media: MediaInputs | None = None,
        groups: int = 0,
    ) -> None:
        self._block_size, self._groups = block_size, groups
        self._staging = staging
        self._states, self._media = states, media
        self._decodes: DecodeBatch | None = None

    def plan(self, slices: Sequence[Slice], behind: Sequence[int] | None = None) -> tuple[torch.Tensor, BatchPlan]:
        """Return the token ids int64 [T] of a batch, and its plan. Slices with one token come first.

        behind: numbers in place of the ids of decodes whose tokens are not known yet."""
        token_ids, plan = self._plan(slices, behind)
        if self._states is not None:
            plan = replace(plan, states=self._states.of(slices))
        if self._media is not None and any(s.request.media is not None for s in slices):
            plan = self._media.joined(plan, slices)
        return token_ids, plan

    def _plan(self, slices: Sequence[Slice], behind: Sequence[int] | None) -> tuple[torch.Tensor, BatchPlan]:
        kept = self._decodes
        if any(s.drafts for s in slices):
            self._decodes = None
            return self._drafted(slices)
        if kept is not None and kept.follows(slices):
            kept.advance(behind)
        elif slices[-1].decodes:
            self._decodes = kept = DecodeBatch(slices, self._block_size, self._staging, behind, self._groups)
        else:
            self._decodes = None
            return build_plan(slices, self._block_size, self._staging, self._groups)
        return kept.plan()

    def _drafted(self, slices: Sequence[Slice]) -> tuple[torch.Tensor, BatchPlan]:
        """Plan decodes alone: each draft is one more decode after that of the token before it."""
        rows = [(s.request, s.start + i) for s in slices for i in range(1 + len(s.drafts))]
        token_ids = [token for s in slices for token in (s.request.token_ids[s.start], *s.drafts)]
        parts = [Part(request.block_ids, position, 1, request.windows) for request, position in rows]
        adapted = by_adapter([request for request, _ in rows])
        return lay_out(token_ids, parts, self._block_size, self._staging, adapted, chained=True, groups=self._groups)


def build_plan(
    slices: Sequence[Slice], block_size: int, staging: Staging, groups: int = 0
) -> tuple[torch.Tensor, BatchPlan]:
    """Return token ids and plan of any batch in new arrays. Slices with one token come first."""
    parts = [Part(s.request.block_ids, s.start, s.count, s.request.windows) for s in slices]
    token_ids = [token for s in slices for token in s.request.token_ids[s.start : s.start + s.count]]
    ends = accumulate(s.count for s in slices)
    drawing = [end - 1 for s, end in zip(slices, ends, strict=True) if s.draws]
    plain = all(s.request.generates and not s.request.wants_prompt_logprobs for s in slices)
    last = tuple(index for index, s in enumerate(slices) if s.draws) if plain else None
    adapted, chained = adapted_tokens(slices), len({id(s.request) for s in slices}) < len(slices)
    return lay_out(
        token_ids, parts, block_size, staging, adapted, drawing=drawing, last=last, chained=chained, groups=groups
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a sequence: `count` from `start` on. Its K/V is in `block_ids`, and in the pages of `windows`."""

    block_ids: Sequence[int]
    start: int
    count: int
    windows: WindowBlocks | None = None


def lay_out(
    token_ids: Sequence[int],
    parts: Sequence[Part],
    block_size: int,
    staging: Staging,
    adapted: Mapping[Adapter, np.ndarray] | None = None,
    *,
    drawing: Sequence[int] | None = None,
    last: tuple[int, ...] | None = None,
    chained: bool = False,
    groups: int = 0,
) -> tuple[torch.Tensor, BatchPlan]:
    """Return the token ids int64 [T] and the plan of a batch of these parts. Parts with one token come first.

    adapted: from `by_adapter`. drawing, last, chained: see BatchPlan. groups: see BatchPlanner."""
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
    arrays = [ids, positions, slots, table, query_start, total_len, chosen, *tokens.values()]
    if groups:
        windows = WindowTables(groups, len(parts), table.shape[1], block_size, len(ids))
        for index, part in enumerate(parts):
            windows.read(index, part.windows)
        windows.write_all(sequence, positions)
        arrays += windows.arrays
    on_device = staging.put(arrays)
    plan = BatchPlan(
        positions=on_device[1],
        slots=on_device[2],
        block_table=on_device[3],
        query_start=on_device[4],
        total_len=on_device[5],
        query_lens=query_lens,
        total_lens=total_lens,
        num_decodes=sum(p.count == 1 for p in parts),
        block_size=block_size,
        adapted=tuple(map(Adapted, tokens, on_device[7 : 7 + len(tokens)])),
        chained=chained,
        drawing=None if drawing is None else on_device[6],
        last=last,
    )
    return on_device[0], plan.with_windows(*on_device[-2:]) if groups else plan
