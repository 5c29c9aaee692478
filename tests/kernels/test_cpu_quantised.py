"""Dense layers over block formats and int8, as stored, of every instruction set, against their dequantised values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.packed_layers import PackedLinear
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.linear import Linear

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")

Kind = gguf.GGMLQuantizationType
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
KINDS = [*HALVES, "INT8", "CODES"]
COLUMNS = 512
EPSILON = 2.0**-8


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: str, rows: int, seed: int = 0) -> tuple[StoredRows, torch.Tensor]:
    """Random rows in every bit pattern of a format, and their values in float64."""
    if kind in ("INT8", "BF16"):
        weight = noise(rows, COLUMNS, seed=seed).bfloat16()
        values = weight.double()
        if kind == "INT8":
            scale = values.abs().amax(1, keepdim=True) / 127
            values = (values / scale).round() * scale
        return StoredRows(kind, weight.view(torch.uint8)), values
    if kind == "CODES":
        codes = torch.randint(-128, 128, (rows, COLUMNS), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
        scales = 0.01 * noise(rows, 1, seed=seed)
        data = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), 1)
        return StoredRows(kind, data), codes.double() * scales.double()
    rng = np.random.default_rng(seed)
    size, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 256, (rows * COLUMNS // size, block_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        halves = (0.01 * rng.standard_normal((len(raw), 1))).astype(np.float16)
        raw[:, offset : offset + 2] = halves.view(np.uint8)
    values = torch.from_numpy(gguf.dequantize(raw, Kind[kind])).view(rows, COLUMNS).double()
    return StoredRows(kind, torch.from_numpy(raw).view(rows, -1)), values


def packed(ops: CpuOps, *parts: StoredRows, bias: torch.Tensor | None = None) -> Linear:
    layer = ops.packed(parts, COLUMNS, bias)
    assert layer is not None
    return layer


def quantised(x: torch.Tensor) -> torch.Tensor:
    """x as the products see it: int8 per row and 32 inputs."""
    runs = x.double().view(len(x), -1, 32)
    scale = runs.abs().amax(2, keepdim=True) / 127
    return ((runs / scale.clamp_min(1e-30)).round() * scale).view(x.shape)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dequantised_product(name: str, kind: str) -> None:
    part, values = stored(kind, 70)
    bias = noise(70, seed=1)
    layer = packed(CpuOps(2, name), part, bias=bias)
    for rows in (1, 2, 3, 5, 8, 9, 17, 200):
        x = noise(rows, COLUMNS, seed=rows).bfloat16()
        x[0, :32] = 0
        expected = quantised(x) @ values.T + bias.double()
        # Group scales are kept as float16, and a code may round to the other side of a half.
        spread = x.double().norm(dim=1, keepdim=True) * values.norm(dim=1)
        torch.testing.assert_close(layer(x).double(), expected, rtol=EPSILON, atol=float(spread.max()) * 3e-4)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_extremes_do_not_overflow(name: str, kind: str) -> None:
    part, values = stored(kind, 32)
    x = torch.full((3, COLUMNS), 127.0).bfloat16()
    x[1] *= -1
    x[2, ::2] *= -1
    expected = x.double() @ values.T
    spread = values.abs().sum(1) * 127
    assert (
        (packed(CpuOps(1, name), part)(x).double() - expected).abs() <= spread * 1e-3 + expected.abs() * EPSILON
    ).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(name: str, kind: str) -> None:
    part, _ = stored(kind, 160)
    layer, x = packed(CpuOps(3, name), part), noise(300, COLUMNS, seed=2).bfloat16()
    whole = layer(x)
    for rows in (1, 2, 5, 9, 30):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    assert torch.equal(packed(CpuOps(1, name), part)(x), whole)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_dequantised_values(name: str, kind: str) -> None:
    part, values = stored(kind, 100)
    ids = torch.tensor([0, 99, 31, 32, 47, 16, 99])
    got = packed(CpuOps(2, name), part).rows(ids)
    torch.testing.assert_close(got.double(), values[ids], rtol=2 * EPSILON, atol=float(values.abs().max()) * 1e-3)


@pytest.mark.parametrize("name", SETS)
def test_some_inputs_of_rows_have_the_codes_of_whole_rows(name: str) -> None:
    """COLUMNS inputs of rows of three times as many, of which some are zeros and some have zeros here."""
    weight, ops, ids = noise(70, 3 * COLUMNS).bfloat16(), CpuOps(2, name), torch.arange(70)
    weight[4], weight[40, :COLUMNS] = 0, 0
    whole = ops.packed([StoredRows("INT8", weight.view(torch.uint8))], 3 * COLUMNS)
    assert whole is not None
    peaks = weight.abs().amax(1).float()
    for part, rows in zip(weight.split(COLUMNS, 1), whole.rows(ids).split(COLUMNS, 1), strict=True):
        layer = packed(ops, StoredRows("INT8", part.contiguous().view(torch.uint8), peaks))
        assert isinstance(layer, PackedLinear)
        assert layer.kinds == {"INT8"}
        assert torch.equal(layer.rows(ids), rows)


def test_rows_of_plain_weights_are_exact() -> None:
    weight = noise(70, 34).bfloat16()
    ids = torch.tensor([69, 0, 33])
    assert torch.equal(CpuOps(2).linear(weight).rows(ids), weight[ids])


@pytest.mark.parametrize("name", SETS)
def test_formats_mix_within_one_layer(name: str) -> None:
    parts = [stored(kind, rows, seed=rows) for kind, rows in [("Q4_K", 64), ("Q6_K", 32), ("BF16", 96), ("Q8_0", 7)]]
    x = noise(5, COLUMNS).bfloat16()
    ops = CpuOps(2, name)
    got = packed(ops, *(part for part, _ in parts))(x)
    assert torch.equal(got, torch.cat([packed(ops, part)(x) for part, _ in parts], 1))


def test_what_is_not_packed_is_declined() -> None:
    ops = CpuOps(1)
    assert ops.packed([StoredRows("IQ2_XS", torch.zeros(32, 74, dtype=torch.uint8))], 256) is None
    assert ops.packed([StoredRows("INT8", noise(32, 40).bfloat16().view(torch.uint8))], 40) is None
    first, second = stored("Q8_0", 33)[0], stored("Q8_0", 32)[0]
    assert ops.packed([first, second], COLUMNS) is None
