"""Norms and activations of single families in plain PyTorch: no row of the operations table has its own. A row of x
depends on nothing but itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight over the last dimension, in float32, rounded once. x: [..., d];
    weight: [d] or, of heads that have their own, [heads, d]."""
    return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()).to(x.dtype)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of gate and up [T, 2 * inner] side by side, by tanh."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) of gate and up [T, 2 * inner] side by side, the gate clamped to at most
    `limit`, up to both sides of zero. In float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)
