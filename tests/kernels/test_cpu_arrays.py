"""Tensors as the compiled kernels read them: PyTorch's, any other's with `__dlpack__`, and those that they refuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.extension import extension
from kvferry.kernels.cpu.packed_layers import PackedLinear

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension")


class Exported:
    """A tensor of a library without the C functions of DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def product(x: Any, gate: Any, out: Any) -> torch.Tensor:
    CpuOps(1).kernels.sigmoid_mul(x, gate, out)
    return torch.as_tensor(out._tensor if isinstance(out, Exported) else out)


@pytest.mark.parametrize("exported", [Exported, torch.Tensor.numpy, torch.nn.Parameter])
def test_tensors_of_any_library_are_read(exported: Any) -> None:
    """Offsets and strides, too: gates are parts of wider rows."""
    x, wide = torch.randn(3, 2, 8), torch.randn(3, 4, 8)
    wanted = torch.zeros(3, 2, 8)
    product(x, wide[:, 1:3], wanted)
    torch.testing.assert_close(wanted, x * torch.sigmoid(wide[:, 1:3]), atol=1e-6, rtol=1e-5)
    with torch.inference_mode():
        out = torch.zeros(3, 2, 8)
    product(exported(x), exported(wide[:, 1:3]), Exported(out))
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("refused", [torch.zeros(3, 2, 8, device="meta"), torch.zeros([1] * 9), None, "x", np.float32])
def test_what_is_no_tensor_on_the_cpu_is_refused(refused: Any) -> None:
    out = torch.zeros(3, 2, 8)
    with pytest.raises(TypeError):
        product(refused, out, out)


def test_a_recorded_mixer_keeps_its_weights_alive() -> None:
    ops = CpuOps(1)
    inputs, out = (ops.linear(torch.randn(rows, 32).bfloat16()) for rows in (96, 32))
    assert isinstance(inputs, PackedLinear)
    assert isinstance(out, PackedLinear)
    conv = torch.randn(32, 3)
    alive = weakref.ref(conv)
    native = extension()
    assert native is not None
    mixer = native.Mixer.short_conv(inputs.weights, conv, None, out.weights, 0)
    del conv
    gc.collect()
    assert alive() is not None
    del mixer
    assert alive() is None
