"""RecurrentOps: the interface of recurrent layers' operations (convolution, delta rule, scan, gates) of a backend."""

from __future__ import annotations

from typing import Protocol

import torch

from kvferry.kernels.batch_plan import BatchPlan


class RecurrentOps(Protocol):
    """Operations of layers that keep a state per sequence.

    `states` is the layer's float32 view [rows, ...] of `plan.states.rows`: dense after the first dimension. Each
    sequence of the plan begins with the row `before` and leaves its state in the row `after` (`SequenceStates`).
    Arithmetic is in float32, outputs are rounded once. Neither chunks nor neighbours change a token's result by more
    than rounding."""

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
        """Return the depthwise convolution [T, channels] of x over each sequence's last `width` tokens.

        weight: [channels, width], the newest token's last. bias: [channels]. states: [rows, channels, width - 1], the
        inputs before. silu: apply SiLU to the result."""

    def gated_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: BatchPlan,
    ) -> torch.Tensor:
        """Return c * conv(b * x) [T, channels] of `causal_conv` (LFM2); both products' factors are rounded as stored.

        x: b, c and x of each token, [T, 3 * channels]. The states hold b * x."""

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
        """Return [T, v_heads, v_dim] of the gated delta rule (Yang et al. 2024).

        q, k: [T, k_heads, k_dim], normalised here; each serves v_heads / k_heads neighbours of v [T, v_heads, v_dim].
        decay, beta: float32 [T, v_heads]. states: [rows, v_heads, k_dim, v_dim]. For each token, S = exp(decay) * S;
        S += k * beta * (v - k S); the output is q S / sqrt(k_dim)."""

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
        """Return y [T, heads, dim] of a selective state space (Gu and Dao 2023; Dao and Gu 2024).

        x: [T, heads, dim]; dt: float32 [T, heads]; a: float32 [heads] (Mamba 2), or [heads, n] (Mamba 1, whose channels
        are heads of dim 1); b, c: [T, groups, n]; d: float32 [heads] or None. states: [rows, heads, dim, n]. For each
        token, S = exp(dt * a) * S + dt * x b; y = S c + d * x. Lightning attention is the case dt = 1, a = -slope,
        b = k, c = q, x = v."""

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
    ) -> torch.Tensor:
        """Return the RMS norm of x times silu(gate), by heads, times the weight, rounded once.

        x, gate: [T, heads, dim]. weight: float32 [dim], or [heads, dim]. norm_first: the gate multiplies the norm's
        output instead."""

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x times the sigmoid of the gate, both [T, heads, dim], rounded once."""

    def time_steps(self, x: torch.Tensor, bias: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
        """Return softplus(x + bias) within the limits, float32 [T, heads]. bias: float32 [heads]."""

    def delta_gates(
        self, rates: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return decay and beta of `gated_delta_rule`, both float32 [T, heads].

        rates: float32 [T, 2 * heads], beta's before those of the decay. beta is the sigmoid of its rate, the decay
        `decay` [heads] times softplus(rate + dt_bias)."""
