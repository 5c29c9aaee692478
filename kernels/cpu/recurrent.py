"""CpuRecurrent: recurrent layers (convolution, delta rule, state-space scan) on the compiled CPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.recurrent_layers import TorchRecurrent, dense_tokens

if TYPE_CHECKING:
    from kvferry.kernels.cpu._native import Kernels

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_WIDTH = 8
"""Widest convolution that is compiled, in tokens."""


class CpuRecurrent(TorchRecurrent):
    """Implements `kernels.recurrent_ops.RecurrentOps` in float32 and bfloat16; the reference serves float16.

    A sequence's results have the same bits whatever else is in its batch, and with any number of threads. With
    _batch_invariant prompts go token by token, so bits do not depend on how they are divided into steps either."""

    kernels: Kernels
    _batch_invariant: bool

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
        *,
        silu: bool,
    ) -> torch.Tensor:
        if not _convolved(x, weight, bias):
            return super().causal_conv(x, weight, bias, states, plan, silu=silu)
        return self._conv(x, weight, bias, states, plan, silu=silu, gated=False)

    def gated_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        if not _convolved(x, weight, bias):
            return super().gated_conv(x, weight, bias, states, plan)
        return self._conv(x, weight, bias, states, plan, silu=False, gated=True)

    def _conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
        *,
        silu: bool,
        gated: bool,
    ) -> torch.Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        bias = None if bias is None else bias.contiguous()
        self.kernels.causal_conv(dense_tokens(x), weight.contiguous(), bias, states, *_rows(plan), silu, gated, out)
        return out

    def gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        if not _native(v) or not q.dtype == k.dtype == v.dtype:
            return super().gated_delta_rule(q, k, v, decay, beta, states, plan)
        out = torch.empty(v.shape, dtype=v.dtype)
        q, k, v, decay, beta = map(dense_tokens, (q, k, v, decay, beta))
        self.kernels.delta_rule(q, k, v, decay, beta, states, *_rows(plan), self._batch_invariant, out)
        return out

    def state_space_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        if not _native(x) or not x.dtype == b.dtype == c.dtype:
            return super().state_space_scan(x, dt, a, b, c, d, states, plan)
        out = torch.empty(x.shape, dtype=x.dtype)
        x, dt, b, c = map(dense_tokens, (x, dt, b, c))
        self.kernels.state_space(x, dt, a.contiguous(), b, c, d, states, *_rows(plan), self._batch_invariant, out)
        return out

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
    ) -> torch.Tensor:
        if not _native(x) or x.dtype != gate.dtype:
            return super().gated_rms_norm(x, gate, weight, eps, norm_first=norm_first)
        out = torch.empty(x.shape, dtype=x.dtype)
        self.kernels.gated_norm(x.contiguous(), dense_tokens(gate), weight, eps, norm_first, out)
        return out

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not _native(x) or x.dtype != gate.dtype:
            return super().sigmoid_mul(x, gate)
        out = torch.empty(x.shape, dtype=x.dtype)
        self.kernels.sigmoid_mul(x.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous(), out)
        return out

    def time_steps(self, x: torch.Tensor, bias: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
        if not _native(x):
            return super().time_steps(x, bias, limits)
        out = torch.empty(x.shape, dtype=torch.float32)
        self.kernels.time_steps(dense_tokens(x), bias, *limits, out)
        return out

    def delta_gates(
        self, rates: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_decay, beta = torch.empty(2, len(rates), len(decay))
        self.kernels.delta_gates(rates.contiguous(), decay, dt_bias, of_decay, beta)
        return of_decay, beta


def _native(*tensors: torch.Tensor) -> bool:
    """Return whether the compiled kernels have formats for all."""
    return all(each.dtype in _DTYPES for each in tensors)


def _convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether the compiled kernels have the convolution."""
    return _native(x, weight) and (bias is None or _native(bias)) and weight.shape[1] <= _MAX_WIDTH


def _rows(plan: BatchPlan) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return the query tokens of each sequence, and the rows of the states that it reads and writes."""
    assert plan.states is not None, "a batch of a recurrent model needs states"
    return list(plan.query_lens), plan.states.before, plan.states.after
