"""The kernels of recurrent layers compiled for GPUs of NVIDIA and AMD, without one. Collected by
test_triton_compiled_recurrent.py in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from kvferry.kernels.triton import TritonOps, device_features
from tests.kernels.hopper import HOPPER, MI300, MI350, SHARED_BYTES, compiled_for
from tests.kernels.recurrent_batch import Layer, convolution, delta_rule, plan_of, scan

PRODUCTS = {"cuda": ("wgmma", "mma.sync"), "hip": ("v_mfma",)}
"""Instructions of matrix products."""


@pytest.fixture(params=[HOPPER, MI300, MI350], ids=lambda target: str(target.arch))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GPUTarget:
    monkeypatch.setattr(device_features, "_architecture", lambda device: str(request.param.arch))
    return request.param


def launch(layer: Layer, *lens: int) -> None:
    """Launch the layer for sequences of these lengths."""
    count = len(lens)
    rows = torch.zeros(2 * count, layer.rows(1).shape[1])
    layer.run(TritonOps(132), plan_of(lens, rows, tuple(range(count)), tuple(range(count, 2 * count))))


def code(kernel: Any, target: GPUTarget) -> str:
    """Return the kernel's assembly, having checked that it fits the device."""
    assert kernel.metadata.shared <= SHARED_BYTES[target.arch]
    text: str = kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(target: GPUTarget, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_for(target, monkeypatch)
    launch(convolution("Qwen3.5", 34, dtype), 1, 33)
    assert set(compiled) == {"causal_conv_kernel"}
    code(compiled["causal_conv_kernel"], target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule(target: GPUTarget, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_for(target, monkeypatch)
    launch(delta_rule("Qwen3.5", 34, dtype), 1, 33)
    assert set(compiled) == {"delta_step_kernel", "chunks_kernel"}
    code(compiled["delta_step_kernel"], target)
    text = code(compiled["chunks_kernel"], target)
    if dtype == torch.bfloat16:
        assert any(name in text for name in PRODUCTS[target.backend])


@pytest.mark.parametrize("name", ["Falcon-H1", "MiniMax"])
def test_scan(target: GPUTarget, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_for(target, monkeypatch)
    launch(scan(name, 34, torch.bfloat16), 1, 33)
    assert set(compiled) == {"scan_step_kernel", "chunks_kernel"}
    code(compiled["scan_step_kernel"], target)
    assert any(each in code(compiled["chunks_kernel"], target) for each in PRODUCTS[target.backend])


def test_scan_of_mamba_1(target: GPUTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_for(target, monkeypatch)
    launch(scan("Jamba", 34, torch.bfloat16), 1, 33)
    assert set(compiled) == {"scan_step_kernel"}
    code(compiled["scan_step_kernel"], target)
