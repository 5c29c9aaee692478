# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""A sequence whose attention several programs compute, each a part of its positions: where parts lie, what they leave,
and how that is merged."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import power_of_two


@triton.jit
def part_of(first, length, part, splits, KEYS: tl.constexpr):
    """Where a part of the positions [first, length) begins, the last of its whole tiles ends, and it does."""
    share = tl.cdiv(tl.cdiv(length - first, KEYS), splits) * KEYS
    begin = tl.minimum(first + part * share, length)
    end = tl.minimum(begin + share, length)
    return begin, begin + (end - begin) // KEYS * KEYS, end


@triton.jit
def store_mean(
    acc,  # float32 [ROWS, BLOCK_D], with top and total what `attend` left
    top,
    total,
    out,
    partial,
    partial_log,
    row,  # int64 [ROWS], of `out`
    part,
    splits,
    dims,
    there,  # which of the rows are heads
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What a part attends to: into `out`, or for `merge_kernel`."""
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    live = there[:, None] & (dims < DIM)[None, :]
    if SPLIT:
        row = row * splits + part
        tl.store(partial + row[:, None] * DIM + dims[None, :], mean, mask=live)
        tl.store(partial_log + row, top + tl.log2(total), mask=there)
    else:
        tl.store(out + row[:, None] * DIM + dims[None, :], mean.to(out.dtype.element_ty), mask=live)


@triton.jit
def merge_kernel(partial, partial_log, out, SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (sequence * heads + head): the parts' means weighted by their sums of weights. The first part is never
    empty, so the largest logarithm is finite."""
    row = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    log = tl.load(partial_log + row * SPLITS + parts)
    weight = tl.exp2(log - tl.max(log, 0))
    live = (parts >= 0)[:, None] & (dims < DIM)[None, :]
    mean = tl.load(partial + (row * SPLITS + parts)[:, None] * DIM + dims[None, :], mask=live, other=0.0)
    merged = tl.sum(mean * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)


class Parts:
    """What the parts of each row's sequence leave. out: [rows, heads, dim], contiguous; splits: parts of a row, a power
    of two. mean: float32 [rows, heads, splits, dim]; log: float32 [rows, heads, splits], log2 of the sum of weights,
    -inf of an empty part. A single part is written to `out`, and both are empty."""

    def __init__(self, out: torch.Tensor, splits: int) -> None:
        self._out, self._splits = out, splits
        rows, heads, dim = out.shape if splits > 1 else (0, 0, 0)
        self.mean = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=out.device)
        self.log = torch.empty((rows, heads, splits), dtype=torch.float32, device=out.device)

    def merge(self) -> None:
        """Into `out`."""
        if self._splits > 1:
            rows, heads, dim = self._out.shape
            merge_kernel[(rows * heads,)](
                self.mean, self.log, self._out, SPLITS=self._splits, DIM=dim, BLOCK_D=power_of_two(dim), num_warps=4
            )
