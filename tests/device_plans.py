"""Batch plans on a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.kernels.batch_plan import BatchPlan


def moved(plan: BatchPlan, device: torch.device | str) -> BatchPlan:
    tensors = ("positions", "slots", "block_table", "query_start", "total_len")
    return replace(plan, **{name: getattr(plan, name).to(device) for name in tensors})
