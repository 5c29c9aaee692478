"""Index tensors that all layers of a batch share in plain PyTorch: gather indices, masks and rotary rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.protocol.layout import blocks_for


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of a batch that one attention call serves: decodes of similar length, or one prefill chunk.

    tokens   their query tokens in the batch
    rows     int64 [planes * count * kv_heads * blocks]  rows of `block_rows` that hold their K, then their V
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
    """Return the layer's pool [num_blocks, planes, kv_heads, block_size, dim] as [rows, block_size * dim].

    It shares the memory. A row is one block of one head's K or V; rows of other layers lie between. Slots and dims must
    be dense, and outer strides multiples of a row (DESIGN, The pool in memory)."""
    blocks, planes, heads, slots, dim = kv_layer.shape
    sb, skv, sh, _, _ = kv_layer.stride()
    row = slots * dim
    assert kv_layer.stride()[3:] == (dim, 1), "slots and dims of the KV pool must be dense"
    assert all(step % row == 0 for step in (sb, skv, sh)), "outer strides of the KV pool must be multiples of a row"
    count = ((blocks - 1) * sb + (planes - 1) * skv + (heads - 1) * sh) // row + 1
    return kv_layer.as_strided((count, row), (row, 1))


class BatchIndex:
    """Index tensors of one batch for pools of one geometry (the strides of `kv_layer`).

    written: tokens whose K/V is written; None means all. write_rows: where it is written."""

    def __init__(self, plan: BatchPlan, kv_layer: torch.Tensor):
        self.plan = plan
        self.strides = kv_layer.stride()
        self.device = kv_layer.device
        _, self.planes, self.kv_heads, self.block_size, self.dim = kv_layer.shape
        row = self.block_size * self.dim
        kv = torch.arange(self.planes, device=self.device)[:, None] * (self.strides[1] // row)
        head = torch.arange(self.kv_heads, device=self.device) * (self.strides[2] // row)
        self._block_step = self.strides[0] // row
        self._kv_head_rows = kv + head
        self._groups: dict[tuple[int, torch.dtype], tuple[AttentionGroup, ...]] = {}
        self._rope: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.written = None if bool((plan.slots >= 0).all()) else (plan.slots >= 0).nonzero().squeeze(1)
        slots = plan.slots if self.written is None else plan.slots[self.written]
        block, slot = slots // self.block_size, slots % self.block_size
        rows = (block * self._block_step)[None, :, None] + self._kv_head_rows[:, None, :]
        self.write_rows = (rows * self.block_size + slot[None, :, None]).flatten(1)

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
        return max(0, computed_len - window + 1) // self.block_size if window else 0

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
        return (ids[None, :, None, :] * self._block_step + self._kv_head_rows[:, None, :, None]).flatten()

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
            hidden = hidden | (position < ends - window)
        mask = _additive(hidden, dtype)[:, None, None, :] if unseen is not None or window else None
        return AttentionGroup(tokens, len(seqs), rows, unseen, max(seen), mask, causal=False)

    def _prefill(self, seq: int, window: int, dtype: torch.dtype) -> AttentionGroup:
        start = sum(self.plan.query_lens[:seq])
        query_len, length = self.plan.query_lens[seq], self._visible(seq, window)
        first = torch.tensor([self._first_block(seq, window)], device=self.device)
        rows = self._rows(slice(seq, seq + 1), first, blocks_for(length, self.block_size))
        causal = length == query_len and not 0 < window < length
        mask: torch.Tensor | None = None
        if not causal:
            position = torch.arange(length, device=self.device)
            own = position[length - query_len :, None]
            hidden = position > own
            if window:
                hidden = hidden | (position <= own - window)
            mask = _additive(hidden, dtype)
        return AttentionGroup(slice(start, start + query_len), 1, rows, None, length, mask, causal)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where visible, -inf where hidden: SDPA would convert a boolean mask again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
