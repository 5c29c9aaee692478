"""What the device that kernels are compiled for can do."""

from __future__ import annotations

from functools import cache

import torch

E4M3_CAPABILITY = (8, 9)
"""First CUDA compute capability whose instructions convert e4m3."""


@cache
def hardware_e4m3(device: torch.device) -> bool:
    """The device converts e4m3 by an instruction; False on a CPU, where Triton interprets."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY
    )
