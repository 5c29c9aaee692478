"""Description of a decoder for a backend that replays whole steps: layers, weights, attention and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.expert_routing import Routing
from kvferry.kernels.quantised_codes import Codes


class Linear(Protocol):
    """A dense layer of weight [out, in] and perhaps a bias [out]."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x @ weight.T + bias of x [n, in], in `dtype` (float32 or x's own, the default)."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, in] of the weight (as an embedding: what `ids`, int64 [n], stand for)."""


class StoredLinear(Linear, Protocol):
    """Over weights that run as they are stored. kinds: in which forms, for other ones make other numbers of the same
    weights."""

    kinds: frozenset[str]


class LinearOfHeads(Protocol):
    """A dense layer for each head, of weights [heads, out, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, out] of x [n, heads, in]."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Neighbouring rows of a weight as stored. kind: a ggml block type (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to
    Q6_K, IQ4_NL or IQ4_XS); BF16; INT8, bfloat16 rows that are to be quantised per channel; or CODES, rows that were: a
    float32 scale, then int8. data: uint8 [rows, bytes of a row]. peaks: float32 [rows], of INT8 of which some inputs
    are elsewhere the largest magnitudes of whole rows; None: these are whole."""

    kind: str
    data: torch.Tensor
    peaks: torch.Tensor | None = None

    def to(self, device: torch.device) -> StoredRows:
        return StoredRows(self.kind, self.data.to(device), None if self.peaks is None else self.peaks.to(device))


Stored = StoredRows | Codes


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated MLP; gate_up is fused in that order of outputs."""

    gate_up: Linear
    down: Linear

    def dense_layers(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the outputs unchanged: no rank lacks a part."""
    return x


def nobody() -> None:
    """There is nobody to wait for."""


class Grouped(Protocol):
    """A dense layer of each expert, as one grouped matrix product."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Rows x [n, in] by the layers of their experts: [n, out]. Rows lie in the order of their experts; ends: int32
        [experts], the row behind each expert's last; experts: int64 [n], of each row. Nothing waits for the device."""


@dataclass(frozen=True, slots=True)
class GroupedGated:
    """The gated MLPs of all experts of a layer, as grouped products. each: the same layers one by one, over the same
    memory."""

    gate_up: Grouped
    down: Grouped
    each: tuple[Gated, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of which the router [experts, hidden] gives a token some. each: None stands for one that is elsewhere.
    correction: see `route`; grouped: the experts of `each` as grouped products, None where there are none; shared: one
    that all tokens pass through, too, None where there is none. joined: makes of what the experts, or the parts of
    them, put out that are here, float32 [n, hidden], what all of them do."""

    router: Linear
    each: tuple[Gated | None, ...]
    routing: Routing
    correction: torch.Tensor | None = None
    shared: Gated | None = None
    joined: Callable[[torch.Tensor], torch.Tensor] = whole
    grouped: GroupedGated | None = None

    def dense_layers(self) -> Iterator[Linear]:
        yield self.router
        for mlp in (*self.each, self.shared):
            if mlp is not None:
                yield from mlp.dense_layers()


@dataclass(frozen=True, slots=True)
class Gqa:
    """Attention of heads that share K/V heads in groups; qkv is fused in that order of outputs. q_norm, k_norm
    [head_dim]: a norm of each head before the rotation, [heads, head_dim]: with weights of its own,
    [heads * head_dim]: one of all heads, or None. rotated: it applies the rotary embedding; window: its sliding window,
    0 for none; sinks: see Ops.paged_attention; None: there is none. normed: takes the place of both norms where they go
    over heads that are elsewhere: of q and k [n, heads * head_dim]."""

    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    rotated: bool
    window: int
    sinks: torch.Tensor | None = None
    normed: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def dense_layers(self) -> Iterator[Linear]:
        yield from (self.qkv, self.o)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (see `kernels.latent`) of heads whose queries have `rotated` dims in front of `plain`
    ones, over a latent of `rank` dims. Queries are made of the layer's input or, where there are q_a and q_norm, of its
    norm behind q_a. kv_a: the shared key and the latent, in this order; kv_norm: of the latent; eps: of these norms.
    expand: latent to K and V of each head in turn, without what rotates; absorb: a head's plain query to one of
    latents; up_v: a latent to what a head puts out, `value` dims. awaited: returns once what the layer caches of the
    batch is written, if another process writes it."""

    q_a: Linear | None
    q_norm: torch.Tensor | None
    q: Linear
    kv_a: Linear
    kv_norm: torch.Tensor
    expand: Linear
    absorb: LinearOfHeads
    up_v: LinearOfHeads
    o: Linear
    rotated: int
    plain: int
    rank: int
    value: int
    eps: float = 1e-6
    awaited: Callable[[], None] = nobody

    def dense_layers(self) -> Iterator[Linear]:
        yield from (each for each in (self.q_a, self.q, self.kv_a, self.expand, self.o) if each is not None)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One layer. input_norm, post_norm: before attention and MLP; behind_attention, behind_mlp: of what they add,
    before it is added; None: there is none."""

    input_norm: torch.Tensor | None
    attention: Gqa | Latent
    post_norm: torch.Tensor | None
    mlp: Gated | Experts
    behind_attention: torch.Tensor | None = None
    behind_mlp: torch.Tensor | None = None

    def dense_layers(self) -> Iterator[Linear]:
        yield from self.attention.dense_layers()
        yield from self.mlp.dense_layers()


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """A decoder of pre-norm layers with gated MLPs. embedding, head: [vocab, hidden]; cos, sin: see
    Ops.rope_and_cache; logits: float32 [T, vocab] of hidden states; plain: its layers are those of Llama, so a row of
    the table that computes them by itself can."""

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
    logits: Callable[[torch.Tensor], torch.Tensor]
    plain: bool


@dataclass(frozen=True, slots=True)
class NextLogits:
    """values: float32 [T, vocab], which may be overwritten; best: where each row's largest lies, the first of equals
    (NO_TOKEN for a row with a NaN, or where it is no finite number), or None where nobody looked."""

    values: torch.Tensor
    best: Sequence[int] | None = None


OneByOne = Callable[[torch.Tensor, torch.Tensor, BatchPlan], torch.Tensor]
"""A decoder's layers through the table's operations: of (token ids, kv, plan), as `Step` takes them, hidden states."""


class Halted(Exception):
    """A step was given up between two layers. layer: the next one; residual: [T, hidden], what it adds to."""

    def __init__(self, layer: int, residual: torch.Tensor) -> None:
        super().__init__(f"given up before layer {layer}")
        self.layer, self.residual = layer, residual


def always() -> bool:
    """Return True: the pass is always wanted."""
    return True


class Step(Protocol):
    """A decoder recorded once. Not thread-safe."""

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        """Return whether it runs batches like this one over the pool `kv` [block, layer, plane, kv_head, slot, dim]."""

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, wanted: Callable[[], bool] = always
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, good until the next call; writes K/V. Equal to the layers run
        one by one through the table's operations. Raises Halted where a batch of prompts alone is not `wanted` between
        two layers."""

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        """Return the head's logits instead."""
