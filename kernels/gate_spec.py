"""Gate: constants that define a gated activation of an MLP (Shazeer 2020); each backend computes it (`gate_mul`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, pi, sqrt


@dataclass(frozen=True, slots=True)
class Gate:
    """Activation g * sigmoid(slope * g + cubic * g^3) * (u + offset) of gate g and up u.

    `limit` bounds g from above and u from both sides."""

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = inf
    offset: float = 0.0


SILU = Gate()
GELU = Gate(slope=2 * sqrt(2 / pi), cubic=2 * sqrt(2 / pi) * 0.044715)
"""GELU by tanh (Hendrycks and Gimpel 2016): 1 + tanh(x) is 2 * sigmoid(2 * x)."""
