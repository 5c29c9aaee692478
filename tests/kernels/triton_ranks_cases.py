"""Ranks with a pool each, in a process each: over Triton's interpreter, or on two GPUs where there are two. Collected
by test_triton_steps.py."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from kvferry.engine.batch_planner import Part, lay_out
from kvferry.engine.models.base import Model
from kvferry.kernels.input_staging import Staging
from tests.kernels.interpreted import DEVICE
from tests.worker.test_rank_processes import assembled, prompt, saved

RANKS = 2


@torch.inference_mode()
def logits(path: Path, ranks: int, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a prompt, and of a token behind it."""
    parts = assembled(path, ranks, kernels=kernels, device=DEVICE, pools_apart=True)
    model, kv, staging = cast(Model, parts.engine.runner.model), parts.kv, Staging(torch.device(DEVICE))
    blocks = [3, 5]
    of_prompt = model.logits(model.forward(*_batch(lay_out(prompt(13), [Part(blocks, 0, 13)], 8, staging), kv)))
    of_token = model.next_logits(*_batch(lay_out([7], [Part(blocks, 13, 1)], 8, staging), kv)).values
    if parts.ranks is not None:
        parts.ranks.close()
    return of_prompt.cpu(), of_token.cpu()


def _batch(laid, kv):
    token_ids, plan = laid
    return token_ids, kv, plan


@pytest.mark.skipif(
    0 < torch.cuda.device_count() < RANKS, reason="NCCL takes one rank a GPU, and this machine has fewer than two"
)
def test_two_ranks_compute_what_the_reference_does_in_one(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaConfig", head_dim=16)
    for found, wanted in zip(logits(tmp_path, RANKS, "triton"), logits(tmp_path, 1, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
