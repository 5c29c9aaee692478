"""CpuStep: a whole decoder step that the C++ extension replays in one call (native/step.h), for plain decoders."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu.step_layers import StepLayers, packed_part
from kvferry.kernels.decoder_spec import DecoderForm, Gqa
from kvferry.kernels.decoder_step import Halted, NextLogits, always
from kvferry.kernels.quantised_cache import vector_width
from kvferry.kernels.sequence_state import SequenceStates

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels, Mixer, Step

MAX_ROWS, MAX_DECODES = 512, 128
"""Limits of a recorded step's rows, and of decodes among them; larger batches run layer by layer."""
_UNIT = 32
_MAX_HEAD_DIM = 512
_MAX_GROUP = 16
_POOL_DTYPES = (torch.bfloat16, torch.int8)


class CpuStep:
    """Implements `kernels.decoder_step.Step` for batches of up to `MAX_ROWS` tokens in bfloat16.

    A model with recurrent layers or gates of attention takes decodes alone. It makes one call to the extension, or one
    per layer for batches of prompts alone."""

    def __init__(self, native: Step, form: DecoderForm, vocab_size: int):
        self._native = native
        self._layers, self._kv_heads, self._head_dim = len(form.layers), form.kv_heads, form.head_dim
        attending = [layer.attention for layer in form.layers if isinstance(layer.attention, Gqa)]
        self._cached, self._recurs = len(attending), len(attending) < len(form.layers)
        self._decodes_alone = self._recurs or any(own.gated for own in attending)
        self._hidden, self._vocab = form.hidden, vocab_size
        self._bound: tuple[torch.Tensor, ...] = ()
        self._states: SequenceStates | None = None
        self._out = torch.empty(0)

    def takes(self, plan: BatchPlan, kv: torch.Tensor) -> bool:
        if self._bound and plan.positions is self._bound[1] and kv is self._bound[-1]:
            return True
        width = vector_width(self._head_dim, kv.dtype)
        shape = (self._cached, 2, self._kv_heads, plan.block_size, width)
        fits = plan.num_decodes <= MAX_DECODES and plan.num_tokens <= MAX_ROWS
        if self._decodes_alone and (plan.num_decodes < plan.num_seqs or (self._recurs and plan.states is None)):
            return False
        return fits and kv.dtype in _POOL_DTYPES and kv.shape[1:] == shape and kv.is_contiguous()

    def __call__(
        self, token_ids: torch.Tensor, kv: torch.Tensor, plan: BatchPlan, keep_going: Callable[[], bool] = always
    ) -> torch.Tensor:
        self._bind(token_ids, kv, plan, self._hidden, torch.bfloat16)
        at_once = self._layers if plan.num_decodes else 1
        for layer in range(0, self._layers, at_once):
            if layer and not keep_going():
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
            self._bound, self._out, self._states = arrays, out, None
        if self._recurs and plan.states is not None and plan.states is not self._states:
            self._native.bind_states(plan.states.rows, plan.states.before, plan.states.after)
            self._states = plan.states


def record(
    step_type: type[Step], mixer_type: type[Mixer], kernels: Kernels, form: DecoderForm, batch_invariant: bool
) -> CpuStep | None:
    """Return the recorded step; None for a form that the extension does not replay. batch_invariant: see `CpuOps`."""
    if not form.plain:
        return None
    embedding, head = packed_part(form.embedding), packed_part(form.head)
    if embedding is None or head is None:
        return None
    if not isinstance(form.norm, torch.Tensor):
        return None
    hidden, group = form.hidden, form.heads // form.kv_heads
    if form.head_dim % _UNIT or form.head_dim > _MAX_HEAD_DIM or group > _MAX_GROUP or hidden % _UNIT:
        return None
    gated = any(isinstance(layer.attention, Gqa) and layer.attention.gated for layer in form.layers)
    if gated and batch_invariant:
        return None
    native = step_type(
        kernels,
        embedding.layer.weights,
        head.layer.weights,
        form.norm,
        form.cos,
        form.sin,
        form.heads,
        form.kv_heads,
        form.head_dim,
        form.eps,
        form.scale,
        batch_invariant,
        gated,
        (embedding.factor, head.factor),
        MAX_ROWS,
        MAX_DECODES,
    )
    layers = StepLayers(native, mixer_type, form.states)
    if not all(layers.add(layer, gated) for layer in form.layers):
        return None
    return CpuStep(native, form, head.layer.out_features)
