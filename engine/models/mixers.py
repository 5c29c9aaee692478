"""Mixers: computes a decoder's recurrent mixers (Mamba, gated delta rule, …) by a backend's operations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_spec import Mixer
from kvferry.kernels.linear import Linear
from kvferry.kernels.mixer_spec import GatedDelta, Lightning, Mamba, ShortConv, StateSpace
from kvferry.kernels.ops import Ops
from kvferry.kernels.sequence_state import StateLayout

Dense = Callable[[Linear, str, torch.Tensor], torch.Tensor]
"""Computes a dense layer of a known name, with what adapters add to it."""


class Mixers:
    """Computes recurrent mixers of any kind. layout: of the model's states."""

    def __init__(self, ops: Ops, layout: StateLayout) -> None:
        self._ops, self._layout = ops, layout

    def __call__(self, mixer: Mixer, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        """Return the mixer's output [T, hidden] for x [T, hidden]; write the sequences' states after these tokens."""
        if isinstance(mixer, ShortConv):
            return self._short_conv(mixer, x, plan, dense)
        if isinstance(mixer, GatedDelta):
            return self._gated_delta(mixer, x, plan, dense)
        if isinstance(mixer, StateSpace):
            return self._state_space(mixer, x, plan, dense)
        if isinstance(mixer, Mamba):
            return self._mamba(mixer, x, plan, dense)
        if isinstance(mixer, Lightning):
            return self._lightning(mixer, x, plan, dense)
        raise TypeError(f"no such mixer: {type(mixer).__name__}")

    def _state(self, plan: BatchPlan, part: int) -> torch.Tensor:
        assert plan.states is not None, "a batch of a recurrent model needs states"
        return self._layout.view(plan.states.rows, part)

    def _short_conv(self, own: ShortConv, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        inputs, states = dense(own.inputs, "in_proj", x), self._state(plan, own.part)
        mixed = self._ops.gated_conv(inputs, own.conv, own.conv_bias, states, plan)
        return dense(own.out, "out_proj", mixed)

    def _gated_delta(self, own: GatedDelta, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        keys, values = own.k_heads * own.k_dim, own.v_heads * own.v_dim
        mixed, gate = torch.split(dense(own.inputs, "in_proj", x), [2 * keys + values, values], 1)
        mixed = self._ops.causal_conv(mixed, own.conv, None, self._state(plan, own.part), plan, silu=True)
        q, k, v = torch.split(mixed, [keys, keys, values], 1)
        decay, beta = self._ops.delta_gates(own.rates(x, torch.float32), own.decay, own.dt_bias)
        q, k = (each.reshape(len(x), own.k_heads, own.k_dim) for each in (q, k))
        if own.tiled and own.k_heads < own.v_heads:
            q, k = (each.repeat(1, own.v_heads // own.k_heads, 1) for each in (q, k))
        found = self._ops.gated_delta_rule(
            q,
            k,
            v.reshape(len(x), own.v_heads, own.v_dim),
            decay,
            beta,
            self._state(plan, own.part + 1),
            plan,
        )
        gates = gate.view(found.shape)
        normed = self._ops.gated_rms_norm(found, gates, own.norm, own.eps, norm_first=True)
        return dense(own.out, "out_proj", normed.flatten(1))

    def _state_space(self, own: StateSpace, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        inner, vectors, count = own.heads * own.dim, own.groups * own.state, len(x)
        sizes = [inner, inner + 2 * vectors, own.heads]
        gate, mixed, steps = torch.split(dense(own.inputs, "in_proj", x), sizes, 1)
        states = self._state(plan, own.part)
        mixed = self._ops.causal_conv(mixed, own.conv, own.conv_bias, states, plan, silu=True)
        values, ins, outs = torch.split(mixed, [inner, vectors, vectors], 1)
        found = self._ops.state_space_scan(
            values.reshape(count, own.heads, own.dim),
            self._ops.time_steps(steps, own.dt_bias, own.limits),
            own.decay,
            ins.reshape(count, own.groups, own.state),
            outs.reshape(count, own.groups, own.state),
            own.skip,
            self._state(plan, own.part + 1),
            plan,
        )
        if own.norm is None:
            return dense(own.out, "out_proj", self._ops.gate_mul(torch.cat([gate, found.flatten(1)], 1)))
        found, gates = found.view(count, own.groups, -1), gate.view(count, own.groups, -1)
        normed = self._ops.gated_rms_norm(
            found, gates, own.norm.view(own.groups, -1), own.eps, norm_first=own.norm_first
        )
        return dense(own.out, "out_proj", normed.flatten(1))

    def _mamba(self, own: Mamba, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        (channels, state), ops = own.decay.shape, self._ops
        mixed, gate = dense(own.inputs, "in_proj", x).chunk(2, 1)
        states = self._state(plan, own.part)
        mixed = ops.causal_conv(mixed, own.conv, own.conv_bias, states, plan, silu=True)
        selected = torch.split(own.selection(mixed), [len(own.dt_norm), state, state], 1)
        ranks, ins, outs = (
            ops.rms_norm(part.contiguous(), norm, own.eps)
            for part, norm in zip(selected, (own.dt_norm, own.in_norm, own.out_norm), strict=True)
        )
        found = ops.state_space_scan(
            mixed.view(len(x), channels, 1),
            ops.time_steps(own.steps(ranks, torch.float32), own.dt_bias, (0.0, math.inf)),
            own.decay,
            ins.view(len(x), 1, state),
            outs.view(len(x), 1, state),
            own.skip,
            self._state(plan, own.part + 1),
            plan,
        ).flatten(1)
        return dense(own.out, "out_proj", ops.gate_mul(torch.cat([gate, found], 1)))

    def _lightning(self, own: Lightning, x: torch.Tensor, plan: BatchPlan, dense: Dense) -> torch.Tensor:
        heads = F.silu(dense(own.inputs, "in_proj", x)).view(len(x), own.heads, 3, own.dim)
        q, k, v = (part.contiguous() for part in heads.unbind(2))
        steps = torch.ones(len(x), own.heads, device=x.device)
        found = self._ops.state_space_scan(v, steps, own.decay, k, q, None, self._state(plan, own.part), plan)
        normed = self._ops.rms_norm(found.flatten(1), own.norm, own.eps)
        gated = self._ops.sigmoid_mul(normed[:, None], own.gate(x)[:, None])
        return dense(own.out, "out_proj", gated.flatten(1))
