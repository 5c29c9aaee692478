"""Distances of logits, tokens and KV blocks between two nodes in a canary check, and each format's tolerance.

Nodes with one fingerprint may use different kernels and batches, which round differently.

All distances are on the scale of logits: the length of the difference as a share of the length of the node's own
numbers. Measured on SmolLM2-135M: between equal kernels 0 on a CPU for any batches; between different ones 1e-6 in
float32, 0.04 in bfloat16, 0.07 with K and V in int8, 0.08 in fp8. If only one node quantises its weights: 0.07 to 0.13;
real faults give more. Recurrent states of tiny random models differ by 0.04 in bfloat16 at most, delta rules most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvferry.kernels.quantised_cache import PEAKS, as_bytes, dequantise

TOLERATED = {"float32": 0.01, "float16": 0.02, "bfloat16": 0.08, "int8": 0.12, "float8_e4m3fn": 0.16}
"""Tolerance by the coarser of the model's and the cache's format."""
K_V, FIRST, STATE = 2.0, 0.25, 0.75
"""Weights of the distances of K and V, of the likeliest token and of recurrent states, relative to that of logits."""


def tolerance(dtype: torch.dtype, cache: torch.dtype, *, exact: bool) -> float:
    """Return the tolerance of a model that computes in `dtype` with K and V in `cache`.

    exact: equal nodes make equal bits."""
    if exact:
        return 0.0
    return max(TOLERATED[str(each).removeprefix("torch.")] for each in (dtype, cache))


def of_logits(own: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the distance of two float32 logits [vocab], as distributions."""
    return _apart(own - own.mean(), theirs - theirs.mean())


def of_blocks(layers: Sequence[torch.Tensor], own: Sequence[int], theirs: Sequence[int], slots: int) -> float:
    """Return the largest distance between blocks of a pool's layers [block, plane, kv_head, slot, dim].

    slots: number of leading slots that are compared."""
    one, other = (torch.cat([_values(kv, ids, slots) for kv in layers], 1) for ids in (own, theirs))
    return K_V * max(_apart(a, b) for a, b in zip(one, other, strict=True))


def of_states(own: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest distance between parts of two recurrent states, float32 [n] each."""
    return STATE * max(_apart(a, b) for a, b in zip(own, theirs, strict=True))


def _values(kv: torch.Tensor, ids: Sequence[int], slots: int) -> torch.Tensor:
    """Return the blocks' numbers in float32, [blocks, n]."""
    x = as_bytes(kv)[list(ids), :, :, :slots].view(kv.dtype)
    return (dequantise(x, torch.float32) if x.dtype in PEAKS else x.float()).flatten(1)


def of_token(own: torch.Tensor, token_id: int) -> float:
    """Return how much likelier another token is than the likeliest one elsewhere, by own float32 logits [vocab]."""
    spread = (own - own.mean()).norm() / math.sqrt(len(own))
    return FIRST * float((own.max() - own[token_id]) / spread.clamp(min=_TINY))


_TINY = torch.finfo(torch.float32).tiny


def _apart(own: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the distance, infinite if theirs has NaN. Raises ArithmeticError if the own numbers have NaN."""
    length, gap = own.norm(), (own - theirs).norm()
    if not torch.isfinite(length):
        raise ArithmeticError("the values computed here are NaN")
    return float(gap / length.clamp(min=_TINY)) if torch.isfinite(gap) else math.inf
