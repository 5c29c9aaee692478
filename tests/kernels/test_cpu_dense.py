"""Packed dense layers of every instruction set against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.packed_layers import PackedLinear

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(ops: CpuOps, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    layer = ops.linear(weight, bias)
    assert isinstance(layer, PackedLinear)
    return layer


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (96, 576), (33, 6), (7, 30), (200, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_float64_within_one_rounding(name: str, out: int, columns: int, biased: bool) -> None:
    weight, bias = random(out, columns).bfloat16(), random(out, seed=1).bfloat16() if biased else None
    layer = packed(CpuOps(2, name), weight, bias)
    for rows in (1, 2, 3, 11, 12, 13, 16, 25, 64, 193):
        x = random(rows, columns, seed=rows).bfloat16()
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=2**-8, atol=2e-5 * columns)


@pytest.mark.parametrize("name", SETS)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    layer, x = packed(CpuOps(3, name), random(160, 96).bfloat16()), random(40, 96, seed=2).bfloat16()
    whole = layer(x)
    for rows in (1, 2, 5, 12, 13, 30):
        assert torch.equal(layer(x[:rows]), whole[:rows])


@pytest.mark.parametrize("name", SETS)
def test_nor_does_one_of_many_rows_over_runs_of_inputs_and_an_odd_number_of_panels(name: str) -> None:
    layer, x = packed(CpuOps(2, name), random(224, 416).bfloat16()), random(400, 416, seed=2).bfloat16()
    whole = layer(x)
    for rows in (1, 16, 17, 48, 100, 193):
        assert torch.equal(layer(x[:rows]), whole[:rows])


@pytest.mark.parametrize("name", SETS)
def test_a_float32_result_is_the_sum_before_rounding(name: str) -> None:
    layer, x = packed(CpuOps(2, name), random(70, 96).bfloat16()), random(9, 96, seed=2).bfloat16()
    exact = layer(x, torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), layer(x))
    assert not torch.equal(exact, layer(x).float())


def test_rows_of_a_wider_tensor() -> None:
    layer, wide = packed(CpuOps(2), random(64, 32).bfloat16()), random(5, 96, seed=3).bfloat16()
    assert torch.equal(layer(wide[:, 32:64]), layer(wide[:, 32:64].contiguous()))


def test_no_rows() -> None:
    assert packed(CpuOps(2), random(64, 32).bfloat16())(torch.empty(0, 32, dtype=torch.bfloat16)).shape == (0, 64)


def test_float32_is_pytorch_s() -> None:
    weight, x = random(64, 32), random(9, 32, seed=4)
    assert torch.equal(CpuOps(2).linear(weight)(x), F.linear(x, weight))


def test_an_odd_width_is_pytorch_s() -> None:
    weight, x = random(64, 33).bfloat16(), random(9, 33, seed=4).bfloat16()
    assert torch.equal(CpuOps(2).linear(weight)(x), F.linear(x, weight))


def test_another_width_is_refused() -> None:
    layer = packed(CpuOps(1), random(64, 32).bfloat16())
    with pytest.raises(ValueError, match="fit the weight"):
        layer(random(2, 34).bfloat16())
