"""InflightStep: handle of a decode step that was launched on the device and whose tokens are collected later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.sampler import Sampled
from kvferry.engine.step_slices import Slice
from kvferry.kernels.token_readback import Readback


@dataclass(frozen=True, slots=True)
class InflightStep:
    """Decode step in flight. rows: indices of its slices among the drawn tokens."""

    drawn: Readback
    rows: Sequence[int]

    @property
    def tokens(self) -> torch.Tensor:
        """Return all drawn tokens: int64 [n] on the device, for the step that is launched after them."""
        return self.drawn.values

    def collect(self) -> list[Sampled]:
        """Wait for the device and return the token of each slice.

        The K/V of the slices is then in the pool, and the link may read it. Raises errors of the device."""
        tokens = self.drawn.wait()
        return [Sampled(tokens[row], None) for row in self.rows]

    def of(self, kept: Sequence[int]) -> InflightStep:
        """Return the step restricted to these of its slices."""
        return InflightStep(self.drawn, [self.rows[i] for i in kept])


Launch = Callable[[Sequence[Slice], InflightStep | None], InflightStep]
"""Signature of `Runner.launch`."""
