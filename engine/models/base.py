"""Interface of models that the runner calls (Model, ModelInfo), and forward passes that are suspended or abandoned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import NextLogits, always
from kvferry.kernels.ops import Ops
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.layout import CachedLayer, KVLayout

KeepGoing = Callable[[], bool]
"""Called between layers: returns whether the computation should continue."""


@dataclass(frozen=True, slots=True)
class SuspendedPass:
    """Forward pass that stopped before `layer`, with its x and residual [T, hidden]."""

    layer: int
    x: torch.Tensor
    residual: torch.Tensor

    def of(self, rows: Sequence[int]) -> SuspendedPass:
        """Return the pass of some of its tokens."""
        kept = torch.tensor(rows, dtype=torch.int64, device=self.x.device)
        return SuspendedPass(self.layer, self.x[kept], self.residual[kept])


class ForwardAbandoned(Exception):
    """A computation was abandoned: no request needs it any more, or another must run first.

    halfway: where it stopped, if it can be resumed there."""

    def __init__(self, halfway: SuspendedPass | None = None) -> None:
        super().__init__("given up")
        self.halfway = halfway


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a model. num_layers, num_kv_heads, head_dim, planes and layers: see `KVLayout`.

    Layers without K/V of their own do not count.

    revision: names the exact weights and the forms they run in (part of the fingerprint). max_model_len: the model's
    own limit in tokens. state_parts: float32 numbers of each part of a sequence's recurrent state (the window of a
    layer's convolution, its heads' matrices), in order; none without recurrent layers. groups: of layers that live for
    different times, each with blocks of its own; None: a block has all layers."""

    name: str
    revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    planes: int = 2
    state_parts: tuple[int, ...] = ()
    layers: tuple[CachedLayer, ...] = ()
    groups: LayerGroups | None = None

    @property
    def state_floats(self) -> int:
        """Return the float32 numbers of a sequence's recurrent state; 0 without recurrent layers."""
        return sum(self.state_parts)

    @property
    def head_dims(self) -> frozenset[int]:
        """Return the dims of the layers' vectors in the cache."""
        return frozenset(layer.head_dim for layer in self.layers) or frozenset((self.head_dim,))

    def layout(self, dtype: torch.dtype, block_size: int) -> KVLayout:
        """Return the layout of the model's KV blocks."""
        name = str(dtype).removeprefix("torch.")
        layers = self.num_layers if self.groups is None else self.groups.full
        shape = layers, self.num_kv_heads, self.head_dim
        return KVLayout(*shape, name, block_size, self.planes, self.layers, self.groups)


class Computing(Protocol):
    """Any model on one device.

    ops: its operations, on the same device. resumable: an abandoned pass can be resumed where it stopped. fed_by_host:
    it takes token ids and plans in host memory wherever it computes, because it passes them on to other ranks."""

    resumable: bool = False
    fed_by_host: bool = False
    info: ModelInfo
    dtype: torch.dtype
    device: torch.device
    ops: Ops


class Model(Computing, Protocol):
    """Decoder. Not thread-safe; the engine thread calls it under `torch.inference_mode()`."""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, hidden] after the final norm, of token_ids int64 [T]; write the tokens' K/V.

        They go into the pool `kv`, in the shape of `KVLayout`. If `keep_going` returns False between
        layers of prompts, it raises ForwardAbandoned, with K/V of some layers written. If that error has `halfway`, a
        pass of all or some of these tokens can continue from there."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [n, vocab_size] of hidden states [n, hidden]."""

    def next_logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        """Return `logits` of `forward` for every token. Valid until the next call of either."""
        return NextLogits(self.logits(self.forward(token_ids, kv, plan)))

    def copy_block(self, kv: torch.Tensor, source: int, target: int) -> None:
        """Copy all of a block's K/V before anything that the next call writes."""
        kv[target].copy_(kv[source])
