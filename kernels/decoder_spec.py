"""Dataclasses that describe a decoder to backends: stored weights, attention, MLP, experts, layers, DecoderForm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.kernels.activation import Activation
from kvferry.kernels.expert_routing import Routing
from kvferry.kernels.layer_norm import Norm
from kvferry.kernels.linear import Linear, LinearOfHeads
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.sequence_state import StateLayout


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Consecutive rows of a weight as stored.

    kind: a ggml block type (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL or IQ4_XS); BF16; INT8, bfloat16 rows to
    be quantised per channel; or CODES, rows that are: a float32 scale, then int8. data: uint8 [rows, bytes of a row].
    peaks: float32 [rows], for INT8 with some inputs on other ranks: the largest magnitudes of whole rows; None: these
    rows are whole."""

    kind: str
    data: torch.Tensor
    peaks: torch.Tensor | None = None

    def to(self, device: torch.device) -> StoredRows:
        """Return the rows on another device."""
        return StoredRows(self.kind, self.data.to(device), None if self.peaks is None else self.peaks.to(device))


Stored = StoredRows | Codes


@dataclass(frozen=True, slots=True)
class Gated:
    """Gated MLP; gate_up is fused in that order of outputs. Of experts without a gate it is up alone."""

    gate_up: Linear
    down: Linear

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Ungated:
    """MLP without a gate: an activation between two dense layers."""

    up: Linear
    down: Linear
    activation: Activation

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.up, self.down)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the outputs unchanged: this rank has all of them."""
    return x


def no_wait() -> None:
    """Return at once: no other process has to write first."""


class Grouped(Protocol):
    """Dense layer of each expert, as one grouped matrix product."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return [n, out]: rows x [n, in], sorted by expert, through the layers of their experts.

        ends: int32 [experts], the end of each expert's rows. experts: int64 [n], the expert of each row. Never waits
        for the device."""


@dataclass(frozen=True, slots=True)
class GroupedGated:
    """Gated MLPs of all experts of a layer, as grouped products. each: the same layers one by one, sharing memory."""

    gate_up: Grouped
    down: Grouped
    each: tuple[Gated, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of gated MLPs: the router [experts, hidden] chooses some for each token.

    each: the experts; None for one on another rank. correction: see `route`. grouped: the experts of `each` as grouped
    products, or None. shared: an MLP for all tokens, or None. shared_gate: [1, hidden], whose sigmoid multiplies the
    outputs of `shared`, or None. joined: combines the outputs of the experts, or parts of them, on this rank, float32
    [n, hidden], with those of other ranks. latent_down, latent_up: [latent, hidden], which makes the inputs of experts
    that compute in a latent, and [hidden, latent], for the sum of their outputs; None: they take hidden states."""

    router: Linear
    each: tuple[Gated | None, ...]
    routing: Routing
    correction: torch.Tensor | None = None
    shared: Gated | None = None
    shared_gate: Linear | None = None
    joined: Callable[[torch.Tensor], torch.Tensor] = whole
    grouped: GroupedGated | None = None
    latent_down: Linear | None = None
    latent_up: Linear | None = None

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield self.router
        yield from filter(None, (self.latent_down, self.latent_up, self.shared_gate))
        for mlp in (*self.each, self.shared):
            if mlp is not None:
                yield from mlp.dense_layers()


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention: groups of heads share K/V heads; qkv is fused in that order of outputs.

    gated: behind each head's query qkv has a gate, whose sigmoid multiplies the head's output. q_norm, k_norm:
    [head_dim], a norm of each head before the rotation; [heads, head_dim], with weights per head; [heads * head_dim],
    one norm over all heads; or None. rotated: applies the rotary embedding. window, sinks: see Ops.paged_attention.
    tempered: queries are multiplied by the temperature of their positions. normed: replaces both norms if they span
    heads on other ranks: of q and k [n, heads * head_dim]. v_norm: [head_dim], a norm of each V head, or None. q_scale:
    factors [head_dim] of rotated q, or None.

    A layer that reads another layer's K/V has only q in qkv; one whose V is its K before norm and rotation has q and
    k."""

    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    rotated: bool
    window: int
    sinks: torch.Tensor | None = None
    normed: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    q_scale: torch.Tensor | None = None
    v_norm: torch.Tensor | None = None
    gated: bool = False
    tempered: bool = False

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (self.qkv, self.o)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (see `kernels.latent`).

    A head's query has `rotated` dims before `plain` ones; the latent has `rank` dims. Queries are computed from the
    layer's input or, if there are q_a and q_norm, from q_norm of q_a. kv_a: gives the shared key and the latent, in
    this order. kv_norm: norm of the latent. eps: of these norms. expand: latent to K and V of each head in turn,
    without the rotated dims. absorb: a head's plain query to one of latents. up_v: a latent to a head's output of
    `value` dims. awaited: returns once another process, if any, has written the batch's cached latents."""

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
    awaited: Callable[[], None] = no_wait

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        yield from (each for each in (self.q_a, self.q, self.kv_a, self.expand, self.o) if each is not None)


class Mixer(Protocol):
    """Recurrent mixer of a layer, beside attention or in its place (forms in `kernels.mixer_spec`)."""

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One layer: attention, a recurrent mixer or both side by side, then an MLP; any of them may be missing.

    input_norm, post_norm: before attention and mixer, and before the MLP; a layer of an MLP alone has the first.
    behind_attention, behind_mlp: norms of their outputs before the residual addition; None: there is none. kept: the
    residual is the output of the norm before attention, and before the MLP, times these factors; None: it is its
    input."""

    input_norm: Norm | None
    attention: Gqa | Latent | None
    post_norm: Norm | None
    mlp: Gated | Ungated | Experts | None
    behind_attention: Norm | None = None
    behind_mlp: Norm | None = None
    mixer: Mixer | None = None
    kept: tuple[float, float] | None = None

    @property
    def mixes(self) -> bool:
        """Return whether the layer looks at other tokens."""
        return self.attention is not None or self.mixer is not None

    def dense_layers(self) -> Iterator[Linear]:
        """Yield the dense layers."""
        for part in (self.attention, self.mixer, self.mlp):
            if part is not None:
                yield from part.dense_layers()


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """Decoder as a backend sees it.

    embedding, head: [vocab, hidden]. cos, sin: see Ops.rope_and_cache. logits: float32 [T, vocab] of hidden states.
    plain: its layers are those of Llama, but for recurrent mixers and gates of attention; some backends compute such
    decoders by themselves. states: of its recurrent mixers."""

    embedding: Linear
    layers: tuple[LayerForm, ...]
    norm: Norm
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
    states: StateLayout
