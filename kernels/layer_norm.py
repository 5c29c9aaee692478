"""Layer norm without bias, in plain PyTorch for all backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean) * rsqrt(variance + eps) * weight over the last dimension, in float32, rounded once.

    x: [..., d]. weight: [d], or [heads, d] if each head has its own."""
    return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()).to(x.dtype)
