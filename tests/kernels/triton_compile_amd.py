"""All other kernels compiled for AMD GPUs, without one. Collected by test_triton_compiled_amd.py in a process of its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from kvferry.kernels.decoder_spec import Stored, StoredRows
from kvferry.kernels.gguf_blocks import FORMATS
from kvferry.kernels.logit_adjustments import Adjusted, Adjustments
from kvferry.kernels.quantised_cache import FP8
from kvferry.kernels.quantised_codes import Codes
from kvferry.kernels.sampling import NoiseKeys
from kvferry.kernels.triton import TritonOps, device_features
from kvferry.kernels.triton.checksum import digests
from kvferry.kernels.triton.coded_product import ORDERED
from kvferry.protocol.sampling import SamplingParams
from tests.kernels.hopper import MI300, MI350, SHARED_BYTES, compiled_for
from tests.kernels.paged_batch import ACTIVATIONS, make_case, rope_table
from tests.kernels.test_latent import LAYER, SCALE, made
from tests.kernels.test_latent import Case as LatentCase

MI300_PROCESSORS = 304
MAX_THREADS = 1024
"""Threads of a program at most."""


class Compiled:
    """Kernels that are compiled for one target from now on, by name."""

    def __init__(self, target: GPUTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_features, "_architecture", lambda device: str(target.arch))
        self.ops, self.target = TritonOps(MI300_PROCESSORS), target
        self.found: dict[str, Any] = compiled_for(target, monkeypatch)

    def checked(self, *names: str) -> list[str]:
        """Return the assembly of these kernels, having checked that there are no others and that each can launch."""
        assert set(self.found) == set(names)
        for name, kernel in self.found.items():
            assert kernel.metadata.warp_size == 64
            assert kernel.metadata.num_warps * 64 <= MAX_THREADS, name
            assert kernel.metadata.shared <= SHARED_BYTES[self.target.arch], name
        return [str(self.found[name].asm["amdgcn"]) for name in names]


def spilled(assembly: str) -> int:
    """Return how many vector registers a kernel keeps in memory."""
    (line,) = (line for line in assembly.splitlines() if ".vgpr_spill_count:" in line)
    return int(line.split()[-1])


@pytest.fixture(params=[MI300, MI350], ids=lambda target: str(target.arch))
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return Compiled(request.param, monkeypatch)


@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (512, torch.float32)])
def test_attention(compiled: Compiled, dim: int, dtype: torch.dtype) -> None:
    case = make_case([1, 1, 150], [1024, 30, 170], 2, heads=8, kv_heads=2, dim=dim, dtype=dtype)
    compiled.ops.paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    decode, prefill, _, _ = compiled.checked("decode_kernel", "prefill_kernel", "divide_kernel", "merge_kernel")
    assert "v_mfma" in decode
    assert "v_mfma" in prefill
    if dim == 128:
        assert not spilled(decode) + spilled(prefill)


@pytest.mark.parametrize(
    ("compiled", "cache"),
    [(MI300, torch.int8), (MI300, FP8), (MI350, FP8)],
    indirect=["compiled"],
    ids=["gfx942-int8", "gfx942-fp8", "gfx950-fp8"],
)
def test_k_and_v_in_8_bits(compiled: Compiled, cache: torch.dtype) -> None:
    """gfx950 converts e4m3; gfx942 would take the same bits for e4m3fnuz."""
    case = make_case([1, 1, 150], [1024, 30, 170], 2, heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, cache=cache)
    key = case.q[:, :2]
    compiled.ops.rope_and_cache(case.q, key, key, *rope_table(32, 32), case.kv_layer, case.plan)
    compiled.ops.paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    others = ("rope_cache_kernel", "divide_kernel", "merge_kernel")
    for assembly in compiled.checked("decode_kernel", "prefill_kernel", *others)[:2]:
        assert "v_mfma" in assembly
        assert not spilled(assembly)
        assert ("_fp8" in assembly) is (cache == FP8 and compiled.target is MI350)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents(compiled: Compiled, dtype: torch.dtype) -> None:
    case = LatentCase("decodes and a prompt" if dtype == torch.bfloat16 else "decodes", dtype)
    compiled.ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(compiled.ops, dtype))
    prefill = {"prefill_kernel"} & set(compiled.found)
    assert len(prefill) == (dtype == torch.bfloat16)
    for assembly in compiled.checked("latent_kernel", "divide_kernel", "merge_kernel", *prefill)[::3]:
        assert "v_mfma" in assembly


def weight(kind: str) -> Stored:
    """256 outputs of 512 inputs, without two of the same code in a row."""
    if kind in FORMATS:
        row = 512 // FORMATS[kind].size * FORMATS[kind].bytes
        return StoredRows(kind, torch.randint(1, 60, (256, row), dtype=torch.uint8))
    if kind == "MXFP4":
        return Codes(torch.tensor([-12, 0, 1, 6], dtype=torch.int8).repeat(256, 128), torch.rand(256, 16))
    if kind == "fp8":
        return Codes(torch.ones(256, 512).to(FP8), torch.rand(2, 4), (128, 128))
    return Codes(torch.randint(-128, 127, (256, 512), dtype=torch.int8), torch.rand(256, 4))


@pytest.mark.parametrize("kind", ["int8", "fp8", "Q4_0", "Q4_K", "MXFP4"])
def test_products_with_codes(compiled: Compiled, kind: str) -> None:
    """Of few rows, of the most that are summed in order, and of more."""
    linear = compiled.ops.packed([weight(kind)], 512)
    assert linear is not None
    for rows in (1, ORDERED):
        compiled.found.clear()
        linear(torch.zeros(rows, 512, dtype=torch.bfloat16))
        others = {"sum_kernel", *(["inputs_kernel"] if kind == "Q4_K" else [])}
        product, *_ = compiled.checked("product_kernel", *others)
        assert "v_mfma" in product
        assert not spilled(product)
        assert ("_fp8" in product) is (kind == "fp8" and compiled.target is MI350)
    compiled.found.clear()
    linear(torch.zeros(ORDERED + 1, 512, dtype=torch.bfloat16))
    compiled.checked("unpack_kernel")


def test_elementwise_and_rope(compiled: Compiled) -> None:
    case = make_case([1, 4], [20, 4], 1, heads=6, kv_heads=2, dim=64, dtype=torch.bfloat16)
    key, x = case.q[:, :2], torch.zeros(5, 576, dtype=torch.bfloat16)
    compiled.ops.rope_and_cache(case.q, key, key, *rope_table(32, 64), case.kv_layer, case.plan)
    compiled.ops.add_rms_norm(x, x, x[0], 1e-5)
    compiled.ops.gate_mul(x)
    for activation in ACTIVATIONS:
        compiled.ops.activate(x, activation)
    compiled.checked("rope_cache_kernel", "rms_norm_kernel", "gate_mul_kernel", "activate_kernel")


def test_sampling(compiled: Compiled) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, repetition_penalty=1.2, logit_bias=((3, 1.0),))
    logits, drawn = torch.zeros(1, 128_256), torch.zeros(1, dtype=torch.int64)
    compiled.ops.adjust(logits, [Adjusted(0, Adjustments(params, [1, 2, 3], 2), 2, 0)], drawn)
    compiled.ops.draw(logits, [params], NoiseKeys((1,), (1,)))
    compiled.checked("note_kernel", "penalise_kernel", "draw_kernel")


def test_checksums(compiled: Compiled) -> None:
    digests([torch.zeros(5000, dtype=torch.uint8)])
    compiled.checked("sums_kernel", "scramble_kernel")
