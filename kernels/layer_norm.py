"""LayerNorm: weights of a layer norm, and its computation in plain PyTorch for backends without their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm of weights [d], or [heads, d] with weights per head; bias: of the same shape, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


Norm = torch.Tensor | LayerNorm
"""Weights of an RMS norm, or a layer norm."""


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return (x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension, in float32, rounded once.

    x: [..., d]. weight, bias: [d], or [heads, d] if each head has its own."""
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
