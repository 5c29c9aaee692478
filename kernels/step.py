"""What a decoder is made of, told to a row of the operations table so that it may replay whole decode steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.plan import BatchPlan


class Linear(Protocol):
    """A dense layer of weight [out, in] and perhaps a bias [out]."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x @ weight.T + bias of x [n, in], in `dtype` (float32 or x's own, the default)."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, in] of the weight (as an embedding: what `ids`, int64 [n], stand for)."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Neighbouring rows of a weight as stored. kind: a ggml block type (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to
    Q6_K, IQ4_NL or IQ4_XS); BF16; INT8, bfloat16 rows that are to be quantised per channel; or CODES, rows that were: a
    float32 scale, then int8. data: uint8 [rows, bytes of a row]."""

    kind: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated MLP; gate_up is fused in that order of outputs."""

    gate_up: Linear
    down: Linear

    def dense_layers(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Nothing is missing."""
    return x


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of which a token passes through the `chosen` that the router [experts, hidden] gives most. Their
    weights are the softmax over all experts or, renormalised, over the chosen ones. joined: makes of what the parts of
    experts put out that are here, float32 [n, hidden], what all of them do."""

    router: Linear
    each: tuple[Gated, ...]
    chosen: int
    renormalised: bool
    joined: Callable[[torch.Tensor], torch.Tensor] = whole

    def dense_layers(self) -> Iterator[Linear]:
        yield self.router
        for mlp in self.each:
            yield from mlp.dense_layers()


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One layer; qkv is fused in that order of outputs. q_norm, k_norm [head_dim]: a norm of each head
    before the rotation, [heads, head_dim]: with weights of its own, [heads * head_dim]: one of all heads, or None.
    rotated: it applies the rotary embedding; window: its sliding window, 0 for none. input_norm, post_norm: before
    attention and MLP; behind_attention, behind_mlp: of what they add, before it is added; sinks: see
    Ops.paged_attention; None: there is none."""

    input_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor | None
    mlp: Gated | Experts
    rotated: bool
    window: int
    behind_attention: torch.Tensor | None = None
    behind_mlp: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """A decoder of pre-norm layers with gated MLPs. embedding, head: [vocab, hidden]; cos, sin: see
    Ops.rope_and_cache."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: torch.Tensor
    head: Linear
    cos: torch.Tensor
    sin: torch.Tensor
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class NextLogits:
    """values: float32 [T, vocab], which may be overwritten; best: where each row's largest lies, the first of equals
    (NO_TOKEN for a row with a NaN, or where it is no finite number), or None where nobody looked."""

    values: torch.Tensor
    best: Sequence[int] | None = None


OneByOne = Callable[[torch.Tensor, torch.Tensor, BatchPlan], torch.Tensor]
"""A decoder's layers through the table's operations: of (token ids, kv, plan), as `Step` takes them, hidden states."""


class Step(Protocol):
    """A decoder recorded once. Not thread-safe."""

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        """Whether it runs batches like this one over the pool `kv` [block, layer, 2, kv_head, slot, dim]."""

    def __call__(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, good until the next call; writes K/V. Equal to the layers run
        one by one through the table's operations."""

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        """The head's logits instead."""
