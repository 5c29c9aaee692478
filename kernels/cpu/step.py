"""Recorded decoder step that the extension replays (native/step.h)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import DecoderForm, Gated, Gqa, LayerForm
from kvferry.kernels.decoder_step import Halted, NextLogits, always
from kvferry.kernels.quantised_cache import vector_width

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels, Packed, Step

MAX_ROWS, MAX_DECODES = 512, 128
"""Most rows of a recorded step, and most decodes among them; larger batches run layer by layer."""
_UNIT = 32
_MAX_HEAD_DIM = 512
_MAX_GROUP = 16
_POOL_DTYPES = (torch.bfloat16, torch.int8)


class CpuStep:
    """Implements `kernels.decoder_step.Step` for batches of up to `MAX_ROWS` tokens in bfloat16.

    It makes one call to the extension, or one per layer for batches of prompts alone."""

    def __init__(self, native: Step, form: DecoderForm, vocab_size: int):
        self._native = native
        self._layers, self._kv_heads, self._head_dim = len(form.layers), form.kv_heads, form.head_dim
        self._hidden, self._vocab = form.hidden, vocab_size
        self._bound: tuple[torch.Tensor, ...] = ()
        self._out = torch.empty(0)

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        if self._bound and plan.positions is self._bound[1] and kv is self._bound[-1]:
            return True
        width = vector_width(self._head_dim, kv.dtype)
        shape = (self._layers, 2, self._kv_heads, plan.block_size, width)
        fits = plan.num_decodes <= MAX_DECODES and plan.num_tokens <= MAX_ROWS
        return fits and kv.dtype in _POOL_DTYPES and kv.shape[1:] == shape and kv.is_contiguous()

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, wanted: Callable[[], bool] = always
    ) -> torch.Tensor:
        self._bind(token_ids, kv, plan, self._hidden, torch.bfloat16)
        at_once = self._layers if plan.num_decodes else 1
        for layer in range(0, self._layers, at_once):
            if layer and not wanted():
                residual = torch.empty_like(self._out)
                self._native.residual(residual)
                raise Halted(layer, residual)
            self._native.run(layer, layer + at_once)
        return self._out

    def logits(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan) -> NextLogits:
        self._bind(token_ids, kv, plan, self._vocab, torch.float32)
        best = self._native.run(0, self._layers)
        return NextLogits(self._out, best)

    def _bind(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, width: int, dtype: torch.dtype) -> None:
        """Pass the arrays that the extension does not know yet."""
        arrays = (token_ids, plan.positions, plan.slots, plan.block_table, plan.query_start, plan.total_len, kv)
        if self._out.dtype != dtype or not self._bound or not all(map(operator.is_, arrays, self._bound)):
            out = torch.empty(len(token_ids), width, dtype=dtype)
            self._bound = ()
            self._native.bind(*arrays[:-1], plan.num_decodes, plan.chained, kv, out)
            self._bound, self._out = arrays, out


def record(step_type: type[Step], kernels: Kernels, form: DecoderForm, batch_invariant: bool) -> CpuStep | None:
    """Return the recorded step; None for a form that the extension does not replay. batch_invariant: see `CpuOps`."""
    if not form.plain:
        return None
    packed = [_packed_parts(layer) for layer in form.layers]
    if None in packed or not (isinstance(form.embedding, PackedLinear) and isinstance(form.head, PackedLinear)):
        return None
    hidden, group = form.hidden, form.heads // form.kv_heads
    if form.head_dim % _UNIT or form.head_dim > _MAX_HEAD_DIM or group > _MAX_GROUP or hidden % _UNIT:
        return None
    native = step_type(
        kernels,
        form.embedding.weights,
        form.head.weights,
        form.norm,
        form.cos,
        form.sin,
        form.heads,
        form.kv_heads,
        form.head_dim,
        form.eps,
        form.scale,
        batch_invariant,
        MAX_ROWS,
        MAX_DECODES,
    )
    for layer, parts in zip(form.layers, packed, strict=True):
        own = layer.attention
        if parts is None or layer.input_norm is None or layer.post_norm is None or not isinstance(own, Gqa):
            return None
        native.add_layer(layer.input_norm, own.q_norm, own.k_norm, layer.post_norm, *parts, own.rotated, own.window)
    return CpuStep(native, form, form.head.out_features)


def _packed_parts(layer: LayerForm) -> tuple[Packed, Packed, Packed, Packed] | None:
    """Return qkv, o, gate_up and down if all are packed and the MLP's width is a whole number of panels."""
    if not isinstance(layer.mlp, Gated) or not isinstance(layer.attention, Gqa):
        return None
    qkv, o, gate_up, down = layer.dense_layers()
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(o, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return None
    return None if down.in_features % _UNIT else (qkv.weights, o.weights, gate_up.weights, down.weights)
