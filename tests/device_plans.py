"""Batch plans on a device."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.kernels.batch_plan import BatchPlan


def moved(plan: BatchPlan, device: torch.device | str) -> BatchPlan:
    tensors = ("positions", "slots", "block_table", "query_start", "total_len")
    states = plan.states and replace(
        plan.states, before=plan.states.before.to(device), after=plan.states.after.to(device)
    )
    until = None if plan.see_until is None else plan.see_until.to(device)
    return replace(plan, states=states, see_until=until, **{name: getattr(plan, name).to(device) for name in tensors})
