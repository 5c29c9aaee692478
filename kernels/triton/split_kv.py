# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Split-KV division of sequences among programs: the parts, their partial results and the merge (flash-decoding).

A batch has a budget of parts, and the device divides it by the lengths that it reads (Flash-Decoding, Dao et al. 2023,
with FlashInfer's division by work). A long sequence among short ones gets most of it, and a captured step divides again
at each replay. Otherwise long sequences would keep a few programs busy while the rest of the device waits."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.triton.tile_sizes import MIN_TILES_PER_PART, power_of_two

ITEM = tl.constexpr(4)
"""Numbers of a part: its sequence, first position, end position, and index among the sequence's parts."""
SPAN = tl.constexpr(2)
"""Numbers of a sequence: its first part, and its number of parts."""


@triton.jit(do_not_specialize=["num_seqs", "spare", "window"])
def divide_kernel(
    total_len, items, spans, num_seqs, spare, window, KEYS: tl.constexpr, MIN_TILES: tl.constexpr, SEQS: tl.constexpr
):
    """Single program: divide the sequences.

    items: int32 [1 + parts, ITEM], the number of parts first. spans: int32 [num_seqs, SPAN]. A part has at least
    MIN_TILES tiles of KEYS positions. All parts have the same number of tiles, the fewest for which `spare` parts
    beyond one per sequence are enough; num_seqs + spare parts bound the roundings up."""
    seq = tl.arange(0, SEQS)
    live = seq < num_seqs
    length = tl.load(total_len + seq, mask=live, other=0)
    chunk = tl.maximum(-window, 1)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first = tl.where(window < 0, tl.maximum(length - 1, 0) // chunk * chunk, first)
    tiles = tl.cdiv(length - first, KEYS)
    tiles_per_part = tl.maximum(tl.cdiv(tl.sum(tiles, 0), spare), MIN_TILES)
    parts = tl.cdiv(tiles, tiles_per_part)
    share = tl.cdiv(tiles, tl.maximum(parts, 1))
    parts = tl.cdiv(tiles, tl.maximum(share, 1))
    before = tl.cumsum(parts, 0) - parts
    tl.store(spans + seq * SPAN, before, mask=live)
    tl.store(spans + seq * SPAN + 1, parts, mask=live)
    tl.store(items, tl.sum(parts, 0))
    for part in range(tl.max(parts, 0)):
        item = items + (1 + before + part) * ITEM
        begin = first + part * share * KEYS
        there = part < parts
        tl.store(item, seq, mask=there)
        tl.store(item + 1, begin, mask=there)
        tl.store(item + 2, tl.minimum(begin + share * KEYS, length), mask=there)
        tl.store(item + 3, tl.zeros_like(seq) + part, mask=there)


@triton.jit
def store_mean(
    acc,  # float32 [ROWS, BLOCK_D], with top and total the result of `attend`
    top,
    total,
    out,
    partial,
    partial_log,
    part,  # of the batch
    whole,  # the sequence has only this part
    seq,
    heads,
    head,  # [ROWS]
    dims,
    there,  # which of the rows are heads
    DIM: tl.constexpr,
):
    """Store the mean of a part, into `out` or for `merge_kernel`."""
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    live = there[:, None] & (dims < DIM)[None, :]
    if whole:
        row = seq.to(tl.int64) * heads + head
        tl.store(out + row[:, None] * DIM + dims[None, :], mean.to(out.dtype.element_ty), mask=live)
    else:
        row = part.to(tl.int64) * heads + head
        tl.store(partial + row[:, None] * DIM + dims[None, :], mean, mask=live)
        tl.store(partial_log + row, top + tl.log2(total), mask=there)


@triton.jit
def merge_kernel(
    partial, partial_log, out, spans, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr
):
    """Program (sequence, head): merge the parts' means, weighted by their sums of weights.

    No part is empty, so the largest logarithm is finite."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(spans + seq * SPAN), tl.load(spans + seq * SPAN + 1)
    if count < 2:
        return
    dims, some = tl.arange(0, BLOCK_D), tl.arange(0, PARTS)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(0, count, PARTS):
        there = start + some < count
        row = (first + start + some).to(tl.int64) * heads + head
        log = tl.load(partial_log + row, mask=there, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(log, 0))
        weight = tl.exp2(log - new_top)
        decay = tl.exp2(top - new_top)
        live = there[:, None] & (dims < DIM)[None, :]
        mean = tl.load(partial + row[:, None] * DIM + dims[None, :], mask=live, other=0.0)
        acc = acc * decay + tl.sum(mean * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    row = seq.to(tl.int64) * heads + head
    tl.store(out + row * DIM + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


class Division:
    """Parts of a batch's sequences, divided on the device once for all layers.

    total_len: int32 [sequences], positions that each attends to, within the window (`protocol.attention_window`). keys:
    positions of a tile. spare: parts beyond one per sequence. items, spans: written by `divide_kernel`. count: maximum
    number of parts."""

    def __init__(self, total_len: torch.Tensor, keys: int, spare: int, window: int = 0) -> None:
        num_seqs = len(total_len)
        self.count = num_seqs + spare
        self.items = torch.empty((1 + self.count, ITEM.value), dtype=torch.int32, device=total_len.device)
        self.spans = torch.empty((num_seqs, SPAN.value), dtype=torch.int32, device=total_len.device)
        divide_kernel[(1,)](
            total_len, self.items, self.spans, num_seqs, spare, window,
            KEYS=keys, MIN_TILES=MIN_TILES_PER_PART, SEQS=power_of_two(num_seqs, 16), num_warps=4,
        )  # fmt: skip

    def partial(self, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for `merge`: means [count, heads, dim], and log2 of weight sums, both float32."""
        shape, device = (self.count, heads), self.items.device
        return (
            torch.empty((*shape, dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def merge(self, mean: torch.Tensor, log: torch.Tensor, out: torch.Tensor) -> None:
        """Merge into `out` [sequences, heads, dim], contiguous, the sequences that have several parts."""
        seqs, heads, dim = out.shape
        merge_kernel[(seqs, heads)](
            mean, log, out, self.spans, heads, DIM=dim, BLOCK_D=power_of_two(dim), PARTS=16, num_warps=4
        )
