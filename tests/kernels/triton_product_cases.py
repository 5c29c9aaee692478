"""Products with weights in codes against the dequantised ones in float64, over Triton's interpreter or a GPU. Collected
by test_triton_products.py."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.gpu_weight_layout import form_of, join_forms
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.triton import TritonOps, dequantised_product
from kvferry.kernels.triton.coded_linear import CodedLinear
from kvferry.kernels.triton.coded_product import ORDERED
from kvferry.kernels.triton.dequantised_product import unpacked_rows
from kvferry.model_files.memory_needs import _CODED
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.paged_batch import TOLERANCE

OUT = 70
WIDER = [torch.float32, torch.float16]
EXTREME = ["int4-zeros", "int8-zeros", "fp8-channel"]
"""Of each kind those whose numbers need most bits."""


def integers(low: int, high: int, columns: int, seed: int = 0) -> torch.Tensor:
    found = torch.randint(low, high + 1, (OUT, columns), generator=torch.Generator().manual_seed(seed))
    return found.to(torch.int8 if low >= -128 and high <= 127 else torch.int16)


def floats(columns: int, seed: int = 0) -> torch.Tensor:
    """All bytes but those of no number."""
    found = torch.randint(0, 127, (OUT, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    signs = torch.randint(0, 2, found.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.uint8)
    return (found | signs << 7).view(torch.float8_e4m3fn)


def doubled(columns: int) -> torch.Tensor:
    """Twice the numbers of e2m1."""
    return torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12])[integers(0, 14, columns).long()].to(
        torch.int8
    )


def scales_of(rows: int, groups: int, seed: int = 9, half: bool = True) -> torch.Tensor:
    """Of both signs."""
    found = torch.randn(rows, groups, generator=torch.Generator().manual_seed(seed)) * 0.01
    return found.half().float() if half else found


def apart(codes: Codes, group: int, columns: int) -> Codes:
    """Each group of each output with a zero point of its own."""
    zeros = torch.randint(0, 16, (OUT, columns // group), generator=torch.Generator().manual_seed(4))
    return Codes.offset(codes.values.to(torch.uint8), zeros.to(torch.int16), codes.scales, codes.order)


def permuted(columns: int, groups: int) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(3)) % groups


CASES = {
    "int4-32": (Codes(integers(-8, 7, 192), scales_of(OUT, 6)), "W4A16"),
    "int4-128": (Codes(integers(-8, 7, 640), scales_of(OUT, 5)), "W4A16"),
    "int4-whole": (Codes(integers(-8, 7, 352), scales_of(OUT, 1)), "W4A16"),
    "int4-one": (Codes(integers(-8, 7, 128), scales_of(1, 1)), "W4A16"),
    "int4-zeros": (apart(Codes(integers(0, 15, 384), scales_of(OUT, 6)), 64, 384), "W4A16"),
    "int4-zeros-whole": (apart(Codes(integers(0, 15, 256), scales_of(OUT, 1)), 256, 256), "W4A16"),
    "int4-ordered": (Codes(integers(-8, 7, 256), scales_of(OUT, 8), order=permuted(256, 8)), "W4A16"),
    "int8-group": (Codes(integers(-128, 127, 160), scales_of(OUT, 5, half=False)), "W8A16"),
    "int8-channel": (Codes(integers(-128, 127, 201), scales_of(OUT, 1, half=False)), "W8A16"),
    "int8-zeros": (Codes(integers(-250, -10, 128), scales_of(OUT, 4)), "W8A16"),
    "int4-16": (Codes(integers(-8, 7, 96), scales_of(OUT, 6)), "W4A16"),
    "int4-48": (Codes(integers(-8, 7, 96), scales_of(OUT, 2)), "W4A16"),
    "int4-zeros-16": (apart(Codes(integers(0, 15, 160), scales_of(OUT, 10)), 16, 160), "W4A16"),
    "int6-16": (Codes(integers(-32, 31, 192), scales_of(OUT, 12)), "W6A16"),
    "int6-128": (Codes(integers(-32, 31, 384), scales_of(OUT, 3)), "W6A16"),
    "int6-whole": (Codes(integers(-32, 31, 192), scales_of(OUT, 1)), "W6A16"),
    "int6-ordered": (Codes(integers(-32, 31, 256), scales_of(OUT, 4), order=permuted(256, 4)), "W6A16"),
    "int5": (Codes(integers(-12, 12, 96), scales_of(OUT, 3)), "W8A16"),
    "mxfp4": (Codes(doubled(96), scales_of(OUT, 3)), "FP4"),
    "mxfp4-whole": (Codes(doubled(96), scales_of(OUT, 1)), "FP4"),
    "fp8-tensor": (Codes(floats(200), scales_of(1, 1)), "FP8"),
    "fp8-channel": (Codes(floats(384), scales_of(OUT, 1)), "FP8"),
    "fp8-block": (Codes(floats(300), scales_of(2, 5), block=(48, 64)), "FP8"),
}


BLOCKS = {
    "Q4_0": ([0], "W4A16"),
    "Q4_1": ([0, 2], "W4A16"),
    "Q5_0": ([0], "W6A16"),
    "Q5_1": ([0, 2], "W6A16"),
    "Q8_0": ([0], "W8A16"),
    "Q2_K": ([80, 82], "W4A16"),
    "Q3_K": ([108], "W4A16"),
    "Q4_K": ([0, 2], "W4A16"),
    "Q5_K": ([0, 2], "W6A16"),
    "Q6_K": ([208], "W6A16"),
    "IQ4_NL": ([0], "W8A16"),
    "IQ4_XS": ([0], "W8A16"),
}
"""Of each block format where its float16 are, and in which form it runs."""


def blocks(kind: str, columns: int) -> tuple[StoredRows, torch.Tensor]:
    """Rows of every bit pattern, and their values in float64, as gguf itself reads them."""
    rng, which = np.random.default_rng(11), gguf.GGMLQuantizationType[kind]
    size, block_bytes = gguf.GGML_QUANT_SIZES[which]
    raw = rng.integers(0, 256, (OUT * columns // size, block_bytes), dtype=np.uint8)
    for at in BLOCKS[kind][0]:
        raw[:, at : at + 2] = (0.01 * rng.standard_normal((len(raw), 1))).astype(np.float16).view(np.uint8)
    values = torch.from_numpy(gguf.dequantize(raw, which)).view(OUT, columns).double()
    return StoredRows(kind, torch.from_numpy(raw).view(OUT, -1).to(DEVICE)), values


def weight_of(codes: Codes) -> torch.Tensor:
    out = torch.empty(codes.values.shape, dtype=torch.float64)
    codes.write(out)
    return out


WEIGHT_ROUNDING = 2**-8
"""Most that a weight in bfloat16 is off, of itself, where its rounding truncates as the interpreter's does."""


def layer(*parts: Codes, bias: torch.Tensor | None = None, processors: int = 8) -> CodedLinear:
    columns = parts[0].values.shape[1]
    moved = [part.to(torch.device(DEVICE)) for part in parts]
    found = TritonOps(processors).packed(moved, columns, None if bias is None else bias.to(DEVICE))
    assert found is not None
    return found


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def expect(linear: CodedLinear, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Off by what sums in float32 round, and what the result is rounded to; of many rows by what weights are rounded
    to, too."""
    wanted = x.cpu().double() @ weight.T + (0 if bias is None else bias.double())
    size = x.cpu().double().abs() @ weight.abs().T + 1.0
    if len(x) > ORDERED:
        size *= WEIGHT_ROUNDING / 2e-6
    exact, rounded = linear(x, torch.float32), linear(x)
    assert (exact.dtype, rounded.dtype) == (torch.float32, x.dtype)
    assert bool(((exact.cpu().double() - wanted).abs() <= 2e-6 * size).all())
    assert bool(((rounded.cpu().double() - wanted).abs() <= 2e-6 * size + TOLERANCE[x.dtype] * wanted.abs()).all())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in CASES), *((name, dtype) for name in EXTREME for dtype in WIDER)],
)
def test_products_are_those_of_the_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    codes, kind = CASES[name]
    linear, weight = layer(codes), weight_of(codes)
    assert linear.kinds == {kind}
    expect(linear, weight, inputs(3, weight.shape[1], dtype))


@pytest.mark.parametrize("name", ["int4-128", "int6-16", "int8-channel", "fp8-block", "int4-zeros"])
@pytest.mark.parametrize("rows", [1, 17, ORDERED + 9])
def test_batches_of_all_heights(name: str, rows: int) -> None:
    codes, _ = CASES[name]
    expect(layer(codes), weight_of(codes), inputs(rows, codes.values.shape[1], torch.bfloat16))


@pytest.mark.parametrize("name", ["int4-128", "int4-ordered", "int6-128", "int8-channel", "fp8-block"])
def test_a_row_has_the_same_bits_in_every_batch_of_the_ladder(name: str) -> None:
    """The parts of the inputs that are added are those of the layer, whatever the batch."""
    codes, _ = CASES[name]
    linear, x = layer(codes, processors=4), inputs(ORDERED, codes.values.shape[1], torch.bfloat16)
    whole = linear(x, torch.float32)
    for rows in ([5], [5, 6], [1, 5, *range(20, 37)], [*range(40), 99]):
        assert torch.equal(linear(x[rows], torch.float32), whole[rows])


def test_large_layers_are_split_along_their_inputs_and_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.kernels.triton import coded_product
    from kvferry.kernels.triton.tile_sizes import product_splits

    splits: list[int] = []
    monkeypatch.setattr(
        coded_product, "product_splits", lambda *given: splits.append(product_splits(*given)) or splits[-1]
    )
    codes = Codes(integers(-8, 7, 1280), scales_of(OUT, 10))
    bias = torch.linspace(-1, 1, OUT)
    linear = layer(codes, bias=bias, processors=64)
    for rows in (1, 20, ORDERED + 1):
        expect(linear, weight_of(codes), inputs(rows, 1280, torch.bfloat16), bias)
    assert splits == [4] * 4, "twice for each batch of the ladder"


def test_parts_of_several_forms_are_one_layer() -> None:
    """As q, k and v: scales of all by part, other kinds, an order of its own."""
    columns = 256
    parts = (
        [Codes(integers(-8, 7, columns), scales_of(1, 1, seed)) for seed in (1, 2)]
        + [CASES[name][0] for name in ("int4-ordered", "int4-zeros-whole")]
        + [Codes(floats(columns), scales_of(1, 1))]
    )
    other = CASES["int4-ordered"][0]
    assert other.order is not None
    parts.insert(3, Codes(other.values, other.scales, order=other.order.flip(0)))
    forms = [found for part in parts if (found := form_of(part)) is not None]
    assert [len(form.codes) for form in join_forms(forms)] == [2 * OUT, OUT, OUT, OUT, OUT]
    bias = torch.linspace(-2, 2, 6 * OUT)
    linear, weight = layer(*parts, bias=bias), torch.cat([weight_of(part) for part in parts])
    assert linear.kinds == {"W4A16", "FP8"}
    expect(linear, weight, inputs(5, columns, torch.bfloat16), bias)
    ids = torch.tensor([0, 3 * OUT - 1, 69, 70, 6 * OUT - 1, 3 * OUT, 140, 70])
    assert torch.equal(linear.rows(ids.to(DEVICE)).cpu(), weight[ids].float().bfloat16())


@pytest.mark.parametrize("name", CASES)
def test_unpacked_weights_are_the_weights(name: str) -> None:
    """In float32 they are exact; inputs lie in the form's order."""
    form = form_of(CASES[name][0].to(torch.device(DEVICE)))
    assert form is not None
    columns = CASES[name][0].values.shape[1]
    found = [unpacked_rows(form, form.kind, *part, columns, torch.float32) for part in ((0, 5), (5, OUT))]
    wanted = form.rows(torch.arange(OUT, device=DEVICE))
    wanted = wanted if form.order is None else wanted[:, form.order]
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_of_unpacked_weights_is_bounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, bias = CASES["int4-128"][0], torch.linspace(-1, 1, OUT)
    columns, sizes = codes.values.shape[1], []
    original = dequantised_product.unpacked_rows
    monkeypatch.setattr(dequantised_product, "SCRATCH_BYTES", 7 * columns * dtype.itemsize + 1)
    monkeypatch.setattr(
        dequantised_product, "unpacked_rows", lambda *given: sizes.append(given[3] - given[2]) or original(*given)
    )
    expect(layer(codes, bias=bias), weight_of(codes), inputs(ORDERED + 1, columns, dtype), bias)
    assert max(sizes) == 7
    assert sum(sizes) == 2 * OUT


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_weights(name: str) -> None:
    codes, _ = CASES[name]
    form = form_of(codes)
    assert form is not None
    assert torch.equal(form.rows(torch.arange(OUT)), weight_of(codes).float())


class Brought(TorchDispatchMode):
    """Counts tensors that are made of numbers of the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", CASES)
def test_rows_take_nothing_from_the_host(name: str) -> None:
    """A captured step cannot, and another one would wait for the device."""
    form, ids = form_of(CASES[name][0]), torch.arange(OUT)
    assert form is not None
    with Brought() as brought:
        torch.tensor([1])
        form.rows(ids)
    assert brought.count == 1


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rows", [3, 17])
def test_blocks_of_a_gguf_run_in_forms_of_the_same_values(kind: str, rows: int) -> None:
    stored, weight = blocks(kind, 512)
    linear = TritonOps(64).packed([stored], 512)
    assert linear is not None
    assert linear.kinds == {BLOCKS[kind][1]}
    assert linear.memory == _CODED[gguf.GGMLQuantizationType[kind]] * weight.numel()
    assert torch.equal(linear.rows(torch.arange(OUT, device=DEVICE)).cpu(), weight.bfloat16())
    expect(linear, weight, inputs(rows, 512, torch.bfloat16))


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q8_0"])
def test_layers_of_one_block_are_whole(kind: str) -> None:
    stored, weight = blocks(kind, 32)
    linear = TritonOps(4).packed([stored], 32)
    assert linear is not None
    expect(linear, weight, inputs(3, 32, torch.float32))


@pytest.mark.parametrize("kind", ["Q4_1", "Q2_K"])
def test_with_minima_too_a_row_has_the_same_bits_in_every_batch_of_the_ladder(kind: str) -> None:
    linear, x = TritonOps(64).packed([blocks(kind, 512)[0]], 512), inputs(ORDERED, 512, torch.bfloat16)
    assert linear is not None
    whole = linear(x, torch.float32)
    for rows in ([5], [1, 5, *range(20, 37)]):
        assert torch.equal(linear(x[rows], torch.float32), whole[rows])


def test_a_gguf_may_mix_its_formats_in_a_layer() -> None:
    """As those that keep v more precisely than q and k."""
    found = [blocks(kind, 256) for kind in ("Q4_K", "Q4_K", "Q6_K", "Q4_0", "Q4_1")]
    linear, weight = TritonOps(4).packed([rows for rows, _ in found], 256), torch.cat([each for _, each in found])
    assert linear is not None
    expect(linear, weight, inputs(3, 256, torch.bfloat16), None)


def test_what_is_no_number_stays_in_its_row_and_its_output() -> None:
    codes, _ = CASES["fp8-channel"]
    values = codes.values.view(torch.uint8).clone()
    values[7, 3] = 0x7F
    linear, x = layer(Codes(values.view(torch.float8_e4m3fn), codes.scales)), inputs(4, 384, torch.bfloat16)
    x[2, 5] = torch.nan
    found = linear(x).isnan().cpu()
    assert bool(found[2].all())
    assert bool(found[:, 7].all())
    assert int(found.sum()) == OUT + 3


def test_inputs_and_outputs_that_are_parts_of_larger_ones() -> None:
    codes, _ = CASES["int8-channel"]
    linear, columns = layer(codes), codes.values.shape[1]
    wide = inputs(4, 2 * columns, torch.bfloat16)
    expect(linear, weight_of(codes), wide[:, columns:])
    wide[:, columns:] = torch.nan
    expect(linear, weight_of(codes), wide[:, :columns])
    expect(linear, weight_of(codes), inputs(columns, 4, torch.bfloat16).T)
    assert linear(wide[:0, :columns]).shape == (0, OUT)


@pytest.mark.parametrize(
    "codes",
    [
        Codes(integers(-8, 7, 48), scales_of(OUT, 1)),
        Codes(integers(-8, 7, 96), scales_of(OUT, 12)),
        Codes(integers(-300, 300, 64), scales_of(OUT, 2)),
        Codes(floats(64).float().to(torch.float8_e5m2), scales_of(OUT, 1)),
        Codes(integers(-8, 7, 64), scales_of(OUT, 2), order=torch.arange(64) // 40),
    ],
)
def test_what_fits_no_form_is_left_to_be_dequantised(codes: Codes) -> None:
    assert TritonOps(4).packed([codes], codes.values.shape[1]) is None


def test_a_layer_in_int8_is_the_nearest() -> None:
    weight = torch.randn(OUT, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[4] = 0
    linear = TritonOps(4).packed([StoredRows("INT8", weight.to(DEVICE).view(torch.uint8))], 96)
    assert linear is not None
    step = weight.float().abs().amax(1, keepdim=True) / 127
    found = linear.rows(torch.arange(OUT, device=DEVICE)).cpu().float()
    assert bool(((found - weight.float()).abs() <= step * 0.5 + weight.float().abs() * 2**-8).all())
    assert not linear(inputs(1, 96, torch.bfloat16))[0, 4]
