"""All other kernels compiled for a Hopper GPU, without one. Collected by test_triton_compiled.py in a process of its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.gguf_blocks import FORMATS
from kvferry.kernels.logit_adjustments import Adjusted, Adjustments
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.sampling import NoiseKeys
from kvferry.kernels.triton import TritonOps, coded_product
from kvferry.kernels.triton.checksum import digests
from kvferry.kernels.triton.coded_product import ORDERED
from kvferry.protocol.sampling import SamplingParams
from tests.kernels.hopper import HOPPER_SHARED_BYTES, compiled_kernels  # noqa: F401
from tests.kernels.paged_batch import ACTIVATIONS, GATES, make_case, rope_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_norm_and_activation(compiled: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_case([1, 4], [20, 4], 1, heads=6, kv_heads=2, dim=64, dtype=dtype)
    key = case.q[:, :2]
    x = torch.zeros(5, 576, dtype=dtype)
    ops = TritonOps()
    ops.rope_and_cache(case.q, key, key, *rope_table(32, 64), case.kv_layer, case.plan)
    ops.rope_and_cache(case.q, key, key, *rope_table(32, 48), case.kv_layer, case.plan)
    ops.rope_and_cache(case.q, key, key, None, None, case.kv_layer, case.plan)
    ops.rms_norm(x, x[0], 1e-5)
    ops.add_rms_norm(x, x, x[0], 1e-5)
    for gate in GATES:
        ops.gate_mul(x, gate)
    for activation in ACTIVATIONS:
        ops.activate(x, activation)
    assert set(compiled) == {"rope_cache_kernel", "rms_norm_kernel", "gate_mul_kernel", "activate_kernel"}


CODES = {
    "int4": (torch.int8, (0, 7), 128, 32),
    "int4-zeros": (torch.int8, (0, 15), 128, 32),
    "int8": (torch.int8, (-128, 127), 4096, 1),
    "fp8-block": (torch.float8_e4m3fn, (0, 8), 128, 32),
}
"""Number format, codes, inputs of a group and how many groups."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CODES), ("int4-zeros", torch.float16)]
)
def test_products_with_codes_use_tensor_cores_and_wide_copies(
    compiled: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    """Of the ladder's two heights by the same instruction, whose sums are of one order."""
    kind, (low, high), group, groups = CODES[name]
    values = torch.randint(low, high, (256, group * groups), dtype=torch.int8)
    linear = TritonOps(132).packed([Codes(values.to(kind), torch.rand(256, groups))], group * groups)
    assert linear is not None
    for rows in (1, ORDERED):
        compiled.clear()
        linear(torch.zeros(rows, group * groups, dtype=dtype))
        assert set(compiled) == {"product_kernel", "sum_kernel"}
        kernel = compiled["product_kernel"]
        assert "mma.sync" in kernel.asm["ptx"]
        assert "cp.async.cg" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= HOPPER_SHARED_BYTES
    compiled.clear()
    linear(torch.zeros(ORDERED + 1, group * groups, dtype=dtype))
    assert set(compiled) == {"unpack_kernel"}
    assert "st.global.v4.b32" in compiled["unpack_kernel"].asm["ptx"]


def test_weights_in_e4m3_are_converted_by_the_hardware(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_product, "hardware_e4m3", lambda device: True)
    linear = TritonOps(132).packed([Codes(torch.ones(256, 512).to(FP8), torch.rand(2, 4), (128, 128))], 512)
    assert linear is not None
    for rows in (1, ORDERED + 1):
        linear(torch.zeros(rows, 512, dtype=torch.bfloat16))
    for name in ("product_kernel", "unpack_kernel"):
        assert "cvt.rn.f16x2.e4m3x2" in compiled[name].asm["ptx"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "MXFP4"])
def test_four_bits_become_bfloat16_without_a_conversion(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(coded_product, "hardware_bfloat16", lambda device: True)
    part: Stored = Codes(torch.tensor([-12, 0, 1, 6], dtype=torch.int8).repeat(64, 128), torch.rand(64, 16))
    if kind != "MXFP4":
        row = 512 // FORMATS[kind].size * FORMATS[kind].bytes
        part = StoredRows(kind, torch.randint(1, 60, (64, row), dtype=torch.uint8))
    linear = TritonOps(132).packed([part], 512)
    assert linear is not None
    linear(torch.zeros(1, 512, dtype=torch.bfloat16))
    ptx = compiled["product_kernel"].asm["ptx"]
    assert ("mul.rn.bf16x2" if kind == "MXFP4" else "sub.rn.bf16x2") in ptx
    assert "cvt.rn.f32.u" not in ptx


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q2_K", "Q6_K", "Q5_K", "MXFP4"])
def test_products_with_short_groups(compiled: dict[str, Any], kind: str) -> None:
    """Tiles are of one group or two."""
    part: Stored = Codes(torch.tensor([-12, 0, 1, 6], dtype=torch.int8).repeat(256, 1024), torch.rand(256, 128))
    if kind != "MXFP4":
        row = 4096 // FORMATS[kind].size * FORMATS[kind].bytes
        part = StoredRows(kind, torch.randint(1, 60, (256, row), dtype=torch.uint8))
    linear = TritonOps(132).packed([part], 4096)
    assert linear is not None
    sums = {"inputs_kernel"} if kind in ("Q4_1", "Q4_K", "Q2_K", "Q5_K") else set()
    for rows in (1, ORDERED):
        compiled.clear()
        linear(torch.zeros(rows, 4096, dtype=torch.bfloat16))
        assert set(compiled) - {"sum_kernel"} == {"product_kernel"} | sums
        kernel = compiled["product_kernel"]
        assert "mma.sync" in kernel.asm["ptx"]
        assert "cp.async" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= HOPPER_SHARED_BYTES


def test_products_with_codes_in_float32(compiled: dict[str, Any]) -> None:
    linear = TritonOps(132).packed([Codes(torch.ones(64, 256, dtype=torch.int8), torch.ones(64, 8))], 256)
    assert linear is not None
    linear(torch.zeros(3, 256))
    assert compiled["product_kernel"].metadata.shared <= HOPPER_SHARED_BYTES


def test_checksums(compiled: dict[str, Any]) -> None:
    digests([torch.zeros(5000, dtype=torch.uint8)])
    assert set(compiled) == {"sums_kernel", "scramble_kernel"}


def test_additions_and_penalties(compiled: dict[str, Any]) -> None:
    params = SamplingParams(repetition_penalty=1.2, logit_bias=((3, 1.0),))
    TritonOps().adjust(
        torch.zeros(1, 128_256),
        [Adjusted(0, Adjustments(params, [1, 2, 3], 2), 2, 0)],
        torch.zeros(1, dtype=torch.int64),
    )
    assert set(compiled) == {"note_kernel", "penalise_kernel"}
    assert "ld.global.v4" in compiled["penalise_kernel"].asm["ptx"]


def test_draws(compiled: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.1)]
    TritonOps().draw(torch.zeros(1, 128_256), params, NoiseKeys((1,), (1,)))
    assert set(compiled) == {"draw_kernel"}
