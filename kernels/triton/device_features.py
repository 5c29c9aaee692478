"""Hardware features of the target GPU: native e4m3 and bfloat16 arithmetic."""

from __future__ import annotations

from functools import cache

import torch

E4M3_CAPABILITY, BFLOAT16_CAPABILITY = (8, 9), (9, 0)
"""First CUDA compute capability that converts e4m3, and that adds and multiplies pairs of bfloat16."""


def hardware_e4m3(device: torch.device) -> bool:
    """Return the device converts e4m3 by an instruction."""
    return _capability(device) >= E4M3_CAPABILITY


def hardware_bfloat16(device: torch.device) -> bool:
    """Return the device adds and multiplies pairs of bfloat16 by an instruction each."""
    return _capability(device) >= BFLOAT16_CAPABILITY


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability; (0, 0) for AMD GPUs, and for CPUs, where Triton interprets."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
