"""Rotary tables of a decoder's layers at the positions of a step: one position for each token, or three (M-RoPE)."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.rope import RopeTables
from kvferry.engine.models.rope_config import RopeConfig
from kvferry.kernels.batch_plan import BatchPlan

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cos and sin, float32 [longest sequence, rotary_dim / 2]."""


class Rotations:
    """Rotary tables of one decoder. Holds those of the last step with media; not thread-safe.

    rope: tables of the layers. local: those of layers with a window, if different. axes: int64 [rotary_dim / 2], which
    of a token's three positions turns each frequency; None: only the first one does."""

    def __init__(self, rope: RopeTables, local: RopeTables | None = None, axes: torch.Tensor | None = None) -> None:
        self._growing = (rope,) if local is None else (rope, local)
        self.rope, self.local = ((each.cos, each.sin) for each in (rope, local or rope))
        self._axes = axes
        self._step: tuple[BatchPlan | None, Tables] = None, self.rope

    def placed(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan whose `positions` are where `tables` are read.

        Tokens without media have three equal positions, so a batch of these alone needs no tables of its own."""
        for each in self._growing:
            each.grow_to(max(plan.total_lens, default=0))
        if plan.rope_positions is None:
            return plan
        if plan.media is None or self._axes is None:
            return replace(plan, positions=plan.rope_positions[0], rope_positions=None)
        placed = replace(plan, positions=torch.arange(len(plan.positions), device=plan.positions.device))
        self._step = placed, self._gathered(plan.rope_positions, self._axes)
        return placed

    def tables(self, plan: BatchPlan, *, windowed: bool) -> Tables:
        """Return the tables of a layer for a plan of `placed`."""
        if plan.rope_positions is None:
            return self.local if windowed else self.rope
        placed, tables = self._step
        assert placed is plan, "the plan of another step"
        return tables

    def _gathered(self, positions: torch.Tensor, axes: torch.Tensor) -> Tables:
        """Return the step's tables [T, rotary_dim / 2] of positions int64 [3, T]."""
        turned = positions[axes].T.contiguous()
        cos, sin = (table.gather(0, turned) for table in self.rope)
        return cos, sin


def rotations_of(config: DecoderConfig, length: int, device: torch.device, divisors: torch.Tensor | None) -> Rotations:
    """Return the rotations of sequences of up to `length` tokens. divisors: see `RopeTables`."""
    rope = RopeTables(config.rope, length if any(config.rotated) else 1, device, divisors)
    local = RopeTables(config.local_rope, length, device) if config.local_rope else None
    return Rotations(rope, local, _axes_of(config.rope, device))


def _axes_of(rope: RopeConfig, device: torch.device) -> torch.Tensor | None:
    """Return which of a token's three positions turns each frequency, int64 [dim / 2]; None: the first turns all."""
    if not rope.sections:
        return None
    if not rope.interleaved:
        return torch.arange(len(rope.sections)).repeat_interleave(torch.tensor(rope.sections)).to(device)
    axes, step = torch.zeros(rope.dim // 2, dtype=torch.int64), len(rope.sections)
    for axis in range(1, step):
        axes[axis : rope.sections[axis] * step : step] = axis
    return axes.to(device)
