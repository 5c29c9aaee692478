"""Hardware features of the target GPU that kernels depend on: maker, native e4m3, bfloat16 and tf32 arithmetic."""

from __future__ import annotations

from functools import cache

import torch

E4M3_CAPABILITY, BFLOAT16_CAPABILITY = (8, 9), (9, 0)
"""First CUDA compute capability that converts e4m3, and that adds and multiplies pairs of bfloat16."""


def on_amd(device: torch.device) -> bool:
    """Return whether the device is a GPU of AMD."""
    return _architecture(device).startswith("gfx")


def hardware_e4m3(device: torch.device) -> bool:
    """Return whether the device converts OCP e4m3 by an instruction.

    gfx942 converts e4m3fnuz instead, whose bits stand for other numbers."""
    return _architecture(device).startswith("gfx950") or _capability(device) >= E4M3_CAPABILITY


def hardware_bfloat16(device: torch.device) -> bool:
    """Return whether the device has NVIDIA's instructions that add and multiply pairs of bfloat16."""
    return _capability(device) >= BFLOAT16_CAPABILITY


def precision_of(x: torch.Tensor) -> str:
    """Return Triton's input precision for products of float32 numbers in a layer whose dtype is x's.

    Float32 layers multiply exactly. Others round to tf32 where there is such an instruction; gfx950 has none, and adds
    three products of bfloat16."""
    if x.dtype == torch.float32:
        return "ieee"
    return "bf16x3" if _architecture(x.device).startswith("gfx950") else "tf32"


@cache
def _architecture(device: torch.device) -> str:
    """Return the name of an AMD GPU's architecture; "" for all others."""
    if device.type != "cuda" or torch.version.hip is None:
        return ""
    return str(torch.cuda.get_device_properties(device).gcnArchName)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability; (0, 0) for AMD GPUs, and for CPUs, where Triton interprets."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
