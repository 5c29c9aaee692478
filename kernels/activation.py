"""Activations of MLPs without a gate: relu² (So et al. 2021), GELU (Hendrycks and Gimpel 2016), xIELU (Huang 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
import torch.nn.functional as F

Kind = Literal["relu2", "gelu_tanh", "gelu", "xielu"]
KINDS: tuple[Kind, ...] = ("relu2", "gelu_tanh", "gelu", "xielu")


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of each number by itself.

    The constants are of xIELU: beta * x, and positive * x^2 above 0, else negative * (expm1(min(x, bound)) - x)."""

    kind: Kind
    positive: float = 0.0
    negative: float = 0.0
    beta: float = 0.0
    bound: float = 0.0


RELU2, GELU_TANH, GELU = Activation("relu2"), Activation("gelu_tanh"), Activation("gelu")


def activate(x: torch.Tensor, own: Activation) -> torch.Tensor:
    """Return the activation of x, in float32, rounded once to its dtype."""
    return _activated(x.float(), own).to(x.dtype)


def _activated(x: torch.Tensor, own: Activation) -> torch.Tensor:
    if own.kind == "relu2":
        return F.relu(x).square()
    if own.kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if own.kind == "gelu":
        return F.gelu(x)
    if own.kind == "xielu":
        below = own.negative * (torch.expm1(x.clamp(max=own.bound)) - x)
        return torch.where(x > 0, own.positive * x * x, below) + own.beta * x
    assert_never(own.kind)
