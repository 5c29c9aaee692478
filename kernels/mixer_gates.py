"""TorchMixerGates: gates and norms around recurrent layers and gated attention, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchMixerGates:
    """Implements the gates and norms of `kernels.recurrent_ops.RecurrentOps` on any device."""

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
    ) -> torch.Tensor:
        opened = F.silu(gate.float())
        inner = x.float() if norm_first else x.float() * opened
        scaled: torch.Tensor = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (scaled * opened if norm_first else scaled).to(x.dtype)

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def time_steps(self, x: torch.Tensor, bias: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
        return F.softplus(x.float() + bias).clamp(*limits)

    def delta_gates(
        self, rates: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        beta, rate = rates.chunk(2, 1)
        return decay * F.softplus(rate + dt_bias), beta.sigmoid()
