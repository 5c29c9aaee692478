"""Gates and norms around recurrent layers on the compiled kernels of every instruction set, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.mixer_gates import TorchMixerGates

SETS = instruction_sets()
SIZES = [(1, 2, 5), (3, 4, 128), (300, 3, 37)]
"""Tokens, heads and their dim."""

pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(2, request.param)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_norms_and_gates_equal_pytorch(ops: CpuOps, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, heads, dim = sizes
    random = torch.Generator().manual_seed(dim)
    x, wide = (torch.randn(tokens, heads, size, generator=random).to(dtype) for size in (dim, 2 * dim))
    weights = torch.rand(dim, generator=random), torch.rand(heads, dim, generator=random)
    behind = torch.randn(tokens, heads * dim + 3, generator=random).to(dtype)[:, 3:].view(tokens, heads, dim)
    known = TorchMixerGates()
    for gate in (wide[..., :dim].contiguous(), behind):
        for weight in weights:
            for first in (True, False):
                found = ops.gated_rms_norm(x, gate, weight, 1e-5, norm_first=first)
                near(found, known.gated_rms_norm(x, gate, weight, 1e-5, norm_first=first))
    for gate in (wide[..., dim:], behind):
        near(ops.sigmoid_mul(x, gate), known.sigmoid_mul(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_and_decays_equal_pytorch(ops: CpuOps, dtype: torch.dtype) -> None:
    random, known = torch.Generator().manual_seed(1), TorchMixerGates()
    x = (torch.randn(70, 20, generator=random) * 20).to(dtype)[:, 3:]
    bias, rate = torch.randn(17, generator=random), -torch.rand(17, generator=random)
    for limits in ((0.0, float("inf")), (0.5, 3.0)):
        near(ops.time_steps(x, bias, limits), known.time_steps(x, bias, limits))
    rates = torch.randn(70, 34, generator=random) * 20
    for found, wanted in zip(ops.delta_gates(rates, rate, bias), known.delta_gates(rates, rate, bias), strict=True):
        near(found, wanted)


def test_bits_depend_neither_on_neighbours_nor_on_threads(ops: CpuOps) -> None:
    x, gate = torch.randn(300, 3, 37).bfloat16(), torch.randn(300, 3, 37).bfloat16()
    weight, more = torch.rand(37), CpuOps(7, ops.instruction_set)
    whole = ops.gated_rms_norm(x, gate, weight, 1e-5, norm_first=True), ops.sigmoid_mul(x, gate)
    for some, part in ((ops, slice(41, 42)), (more, slice(None))):
        found = some.gated_rms_norm(x[part], gate[part], weight, 1e-5, norm_first=True)
        assert torch.equal(found, whole[0][part])
        assert torch.equal(some.sigmoid_mul(x[part], gate[part]), whole[1][part])
