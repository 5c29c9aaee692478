"""BatchIndex: gather indices, masks and rotary rows of one batch, which all layers of the reference backend share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.protocol.attention_window import first_seen
from kvferry.protocol.layout import blocks_for


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of a batch that one attention call serves: decodes of similar length, or one prefill chunk.

    tokens   their query tokens in the batch
    rows     int64 [n]  rows of `block_rows` that hold their K, then their V: [planes, count, kv_heads, blocks]
    unseen   int64 or None: gathered rows beyond a sequence's end, which may hold anything
    length   positions gathered of each sequence, at most blocks * block_size
    mask     additive, of the query's dtype, [count, 1, 1, length] or [query_len, length]; None: see `causal`
    causal   query j sees position j and those before; otherwise, without a mask, every query sees all
    """

    tokens: slice | torch.Tensor
    count: int
    rows: torch.Tensor
    unseen: torch.Tensor | None
    length: int
    mask: torch.Tensor | None
    causal: bool


def block_rows(kv_layer: torch.Tensor) -> torch.Tensor:
    """Return the layer's pool [num_blocks, planes, kv_heads, block_size, dim] as rows [n, numbers] of its memory.

    A row is one block of one head's K or V; rows of other layers lie between. Where layers of other shapes lie between,
    a row is the largest part of that which divides all strides. Slots and dims must be dense."""
    assert kv_layer.stride()[3:] == (kv_layer.shape[4], 1), "slots and dims of the KV pool must be dense"
    row = kv_layer.shape[3] * kv_layer.shape[4]
    unit = _unit(kv_layer, row)
    last = sum((count - 1) * step for count, step in zip(kv_layer.shape[:3], kv_layer.stride()[:3], strict=True))
    return kv_layer.as_strided(((last + row) // unit, unit), (unit, 1))


def _unit(kv_layer: torch.Tensor, length: int) -> int:
    """Return the largest number that divides a length and the outer strides."""
    return math.gcd(length, *kv_layer.stride()[:3])


class BatchIndex:
    """Index tensors of one batch for pools of one geometry (shape and strides of `kv_layer`).

    written: tokens whose K/V is written; None means all. write_rows: where it is written, in rows of `vector` numbers,
    a whole K or V vector or a part of it."""

    def __init__(self, plan: BatchPlan, kv_layer: torch.Tensor):
        self.plan = plan
        self.device = kv_layer.device
        _, self.planes, self.kv_heads, self.block_size, self.dim = kv_layer.shape
        row, (of_block, of_plane, of_head) = self.block_size * self.dim, kv_layer.stride()[:3]
        self._unit, self.vector = _unit(kv_layer, row), _unit(kv_layer, self.dim)
        planes = torch.arange(self.planes, device=self.device)[:, None] * of_plane
        starts = planes + torch.arange(self.kv_heads, device=self.device) * of_head
        self._block_step, self._starts = of_block // self._unit, starts // self._unit
        self._groups: dict[tuple[int, torch.dtype], tuple[AttentionGroup, ...]] = {}
        self._rope: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.written = None if bool((plan.slots >= 0).all()) else (plan.slots >= 0).nonzero().squeeze(1)
        slots = plan.slots if self.written is None else plan.slots[self.written]
        places = slots // self.block_size * of_block + slots % self.block_size * self.dim
        first = (places[None, :, None] + starts[:, None, :]) // self.vector
        self.write_rows = self._whole(first, self.dim // self.vector).flatten(1)

    def _whole(self, first: torch.Tensor, parts: int) -> torch.Tensor:
        """Return the rows from `first` on that `parts` of them make up."""
        return first if parts == 1 else first[..., None] + torch.arange(parts, device=self.device)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, cos) and (-sin, sin) of the batch's positions, float32 [T, 1, rotary_dim].

        The cache tells tables apart by identity. Its entry keeps `cos` alive, so no other table can take its id."""
        found = self._rope.get(id(cos))
        if found is None:
            c, s = cos[self.plan.positions], sin[self.plan.positions]
            found = (cos, torch.cat((c, c), -1).unsqueeze(1), torch.cat((-s, s), -1).unsqueeze(1))
            self._rope[id(cos)] = found
        return found[1:]

    def groups(self, window: int, dtype: torch.dtype) -> tuple[AttentionGroup, ...]:
        """Return groups that cover every query token once."""
        key = (window, dtype)
        if key not in self._groups:
            decodes = [self._decodes(seqs, window, dtype) for seqs in self._similar_decodes(window)]
            prefills = [self._prefill(s, window, dtype) for s in range(self.plan.num_decodes, self.plan.num_seqs)]
            self._groups[key] = (*decodes, *prefills)
        return self._groups[key]

    def _first_block(self, seq: int, window: int) -> int:
        """Return the first block that any query token of the sequence sees."""
        computed_len = self.plan.total_lens[seq] - self.plan.query_lens[seq]
        return first_seen(computed_len, window) // self.block_size

    def _visible(self, seq: int, window: int) -> int:
        """Return the number of positions from the first visible block to the sequence's end."""
        return self.plan.total_lens[seq] - self._first_block(seq, window) * self.block_size

    def _similar_decodes(self, window: int) -> list[list[int]]:
        """Return decodes bucketed by visible blocks to the next power of two, so padding at most doubles the reads."""
        buckets: dict[int, list[int]] = {}
        for seq in range(self.plan.num_decodes):
            blocks = blocks_for(self._visible(seq, window), self.block_size)
            buckets.setdefault((blocks - 1).bit_length(), []).append(seq)
        return list(buckets.values())

    def _rows(self, seqs: torch.Tensor | slice, first: torch.Tensor, blocks: int) -> torch.Tensor:
        """Return the rows of `blocks` blocks from `first` [count] on, ordered [K or V, sequence, head, block]."""
        table = self.plan.block_table[seqs].long()
        columns = first[:, None] + torch.arange(blocks, device=self.device)
        ids = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        first = ids[None, :, None, :] * self._block_step + self._starts[:, None, :, None]
        return self._whole(first, self.block_size * self.dim // self._unit).flatten()

    def _decodes(self, seqs: list[int], window: int, dtype: torch.dtype) -> AttentionGroup:
        dense = seqs[-1] - seqs[0] + 1 == len(seqs)
        tokens = slice(seqs[0], seqs[-1] + 1) if dense else torch.tensor(seqs, device=self.device)
        first = torch.tensor([self._first_block(s, window) for s in seqs], device=self.device)
        seen = [self._visible(s, window) for s in seqs]
        blocks = blocks_for(max(seen), self.block_size)
        rows = self._rows(tokens, first, blocks)
        ends = torch.tensor(seen, device=self.device)[:, None]
        unseen: torch.Tensor | None = None
        if min(seen) < max(seen):
            behind = torch.arange(blocks * self.block_size, device=self.device) >= ends
            shape = (self.planes, len(seqs), self.kv_heads, blocks * self.block_size)
            unseen = behind[None, :, None, :].expand(shape).flatten().nonzero().squeeze(1)
        position = torch.arange(max(seen), device=self.device)
        hidden = position >= ends
        if window:
            begins = [first_seen(self.plan.total_lens[s] - 1, window) for s in seqs]
            hidden = hidden | (
                position < torch.tensor(begins, device=self.device)[:, None] - first[:, None] * self.block_size
            )
        mask = _additive(hidden, dtype)[:, None, None, :] if unseen is not None or window else None
        return AttentionGroup(tokens, len(seqs), rows, unseen, max(seen), mask, causal=False)

    def _prefill(self, seq: int, window: int, dtype: torch.dtype) -> AttentionGroup:
        start = sum(self.plan.query_lens[:seq])
        query_len, length = self.plan.query_lens[seq], self._visible(seq, window)
        first = torch.tensor([self._first_block(seq, window)], device=self.device)
        rows = self._rows(slice(seq, seq + 1), first, blocks_for(length, self.block_size))
        until = None if self.plan.see_until is None else self.plan.see_until[start : start + query_len]
        causal = until is None and length == query_len and not 0 < abs(window) < length
        mask: torch.Tensor | None = None
        if not causal:
            position = torch.arange(length, device=self.device)
            own = position[length - query_len :, None]
            begin = self._first_block(seq, window) * self.block_size
            hidden = position > (own if until is None else until[:, None] - begin)
            if window > 0:
                hidden = hidden | (position <= own - window)
            elif window < 0:
                hidden = hidden | (position + begin < (own + begin) // -window * -window)
            mask = _additive(hidden, dtype)
        return AttentionGroup(slice(start, start + query_len), 1, rows, None, length, mask, causal)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where visible, -inf where hidden: SDPA would convert a boolean mask again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
