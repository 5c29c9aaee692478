"""Attention that transformers' modules call: attends over the paged KV cache, or records the model's layer shapes.

Each of a model's attention modules holds a reference to the model's slot, so nothing has to travel through the keyword
arguments of forward, which not every model passes on. This module does not import transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvferry.engine.models.base import ForwardAbandoned, KeepGoing
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.ops import Ops
from kvferry.protocol.errors import ConfigError

SLOT = "kvferry_slot"
_ALTERS_SCORES = ("softcap", "s_aux", "position_bias", "head_mask", "block_mask")


class Attention(Protocol):
    """Causal attention of one layer: q [T, heads, dim], k and v [T, kv_heads, dim]; returns [T, heads, dim]."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Return the attention [T, heads, dim] of q over the cache, after writing k and v to it."""


@dataclass(slots=True)
class AttentionSlot:
    """Slot for the attention of the current forward pass."""

    attention: Attention | None = None


def attach_slot(model: torch.nn.Module) -> AttentionSlot:
    """Attach one slot to every module that knows its layer."""
    slot = AttentionSlot()
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, SLOT, slot)
    return slot


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface. Raises ConfigError if the model needs more than causal attention.

    query [1, heads, T, dim], key and value [1, kv_heads, T, dim], already rotated; returns [1, T, heads, dim]."""
    altered = [name for name in _ALTERS_SCORES if kwargs.get(name) is not None]
    if attention_mask is not None:
        altered.append("a mask of its own")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        altered.append("attention to later tokens")
    if altered:
        raise ConfigError(f"the model's attention uses {', '.join(altered)}, which is not supported", param="model")
    slot: AttentionSlot = getattr(module, SLOT)
    assert slot.attention is not None, "attention outside a forward pass"
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer: Any = module.layer_idx
    return slot.attention.attend(layer, q, k, v, scale, sliding_window or 0).unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention in `dtype` through the pool `kv` by `plan`. Raises ForwardAbandoned once `keep_going()` is false."""

    ops: Ops
    kv: torch.Tensor
    plan: BatchPlan
    dtype: torch.dtype
    keep_going: KeepGoing

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Write k and v to the pool and compute paged attention; raise ForwardAbandoned unless `keep_going()`."""
        if not self.keep_going():
            raise ForwardAbandoned
        kv_layer, dtype = self.kv[:, layer], q.dtype
        q, k, v = (tensor.to(self.dtype).contiguous() for tensor in (q, k, v))
        q = self.ops.rope_and_cache(q, k, v, None, None, kv_layer, self.plan)
        return self.ops.paged_attention(q, kv_layer, self.plan, scale, window).to(dtype)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV cache shape of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class ShapeProbe:
    """Attention that records each layer's shape and returns its queries."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Record the layer's shapes; return q."""
        self.shapes[layer] = LayerShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], window)
        return q

    def check(self, config: Any) -> None:
        """Raise ConfigError if the layers did not call attention as the config says.

        Each layer must call it, layers must be alike, and the config's windows must be requested."""
        layers = config.num_hidden_layers
        if sorted(self.shapes) != list(range(layers)):
            raise ConfigError(
                f"only {len(self.shapes)} of the model's {layers} layers use transformers' attention interface",
                param="model",
            )
        first = self.shapes[0]
        if {(s.kv_heads, s.head_dim, s.value_dim) for s in self.shapes.values()} != {
            (first.kv_heads, first.head_dim, first.head_dim)
        }:
            raise ConfigError("the model's layers have K/V of different shapes, which is not supported", param="model")
        self._check_windows(config)

    def _check_windows(self, config: Any) -> None:
        types = getattr(config, "layer_types", None) or ["full_attention"] * len(self.shapes)
        for layer, kind in enumerate(types[: len(self.shapes)]):
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"layer type {kind!r:.80} of the model is not supported", param="model")
            if kind == "sliding_attention" and not self.shapes[layer].window:
                raise ConfigError("the model hides its sliding window from the attention interface", param="model")
