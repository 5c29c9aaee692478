"""Every kernel of attention compiled for a Hopper GPU, without one. Collected by test_triton_compiled_attention.py in a
process of its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvferry.kernels.quantised_cache import FP8, PEAKS
from kvferry.kernels.triton import TritonOps, eight_bits
from tests.kernels.hopper import HOPPER_SHARED_BYTES, compiled_kernels  # noqa: F401
from tests.kernels.paged_batch import make_case, rope_table, sinks_of
from tests.kernels.test_latent import LAYER, SCALE, made
from tests.kernels.test_latent import Case as LatentCase


def copies_ahead(kernel: Any) -> bool:
    """A wait for asynchronous copies leaves some under way: they overlap with what is computed."""
    return any(int(number) > 0 for number in re.findall(r"async_wait.*num = (\d+)", kernel.asm["ttgir"]))


@pytest.mark.parametrize(
    ("window", "cap", "sunk", "processors"), [(0, 0.0, False, 132), (512, 50.0, True, 1), (-512, 0.0, False, 132)]
)
def test_bfloat16_attention_uses_tensor_cores_and_wide_copies(
    compiled: dict[str, Any], window: int, cap: float, sunk: bool, processors: int
) -> None:
    """A device of one multiprocessor is filled by the tallest tiles, which leave the least memory for all else."""
    case = make_case([1, 1, 150], [1024, 30, 170], 2, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16)
    sinks = sinks_of(case) if sunk else None
    TritonOps(processors).paged_attention(case.q, case.kv_layer, case.plan, 0.1, window, cap, sinks)
    assert set(compiled) == {"divide_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"}
    assert "mma.sync" in compiled["decode_kernel"].asm["ptx"]
    assert "wgmma" in compiled["prefill_kernel"].asm["ptx"]
    for name in ("decode_kernel", "prefill_kernel"):
        assert "cp.async.cg" in compiled[name].asm["ptx"]
        assert compiled[name].metadata.shared <= HOPPER_SHARED_BYTES
    assert copies_ahead(compiled["prefill_kernel"]), "each step of the loop waits for the copies that it has just begun"


@pytest.mark.parametrize(("cache", "dim"), [(torch.int8, 128), (FP8, 64)])
def test_k_and_v_in_8_bits_are_read_in_words_through_tensor_cores(
    compiled: dict[str, Any], cache: torch.dtype, dim: int
) -> None:
    case = make_case([1, 1, 150], [1024, 30, 170], 2, heads=8, kv_heads=2, dim=dim, dtype=torch.bfloat16, cache=cache)
    ops, key = TritonOps(132), case.q[:, :2]
    ops.rope_and_cache(case.q, key, key, *rope_table(32, dim // 2), case.kv_layer, case.plan)
    ops.paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    assert set(compiled) == {"rope_cache_kernel", "divide_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"}
    for name, product in (("decode_kernel", "mma.sync"), ("prefill_kernel", "wgmma")):
        assert product in compiled[name].asm["ptx"]
        assert "cp.async.ca" in compiled[name].asm["ptx"]
        assert "ld.global.b8" not in compiled[name].asm["ptx"]
        assert compiled[name].metadata.shared <= HOPPER_SHARED_BYTES


def test_latents_are_read_through_tensor_cores(compiled: dict[str, Any]) -> None:
    """Of DeepSeek V3's sizes but for the number of heads; chunks that make keys and values have head dims of 192."""
    case, ops = LatentCase("decodes and a prompt", torch.bfloat16), TritonOps(132)
    ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(ops, torch.bfloat16))
    assert set(compiled) == {"divide_kernel", "latent_kernel", "merge_kernel", "prefill_kernel"}
    assert all(kernel.metadata.shared <= HOPPER_SHARED_BYTES for kernel in compiled.values())
    ptx = compiled["latent_kernel"].asm["ptx"]
    assert "mma.sync" in ptx
    assert "cp.async.cg" in ptx
    assert "ld.global.b16" not in ptx


def test_latents_in_fp8_are_read_in_words(compiled: dict[str, Any]) -> None:
    case, ops = LatentCase("decodes", torch.bfloat16, cache=FP8), TritonOps(132)
    ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(ops, torch.bfloat16))
    ptx = compiled["latent_kernel"].asm["ptx"]
    assert "mma.sync" in ptx
    assert "ld.global.b8" not in ptx
    assert compiled["latent_kernel"].metadata.shared <= HOPPER_SHARED_BYTES


def test_latents_in_float32(compiled: dict[str, Any]) -> None:
    case, ops = LatentCase("decodes", torch.float32), TritonOps(132)
    ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(ops, torch.float32))
    assert compiled["latent_kernel"].metadata.shared <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("cache", PEAKS)
def test_8_bits_under_queries_in_float16(compiled: dict[str, Any], cache: torch.dtype) -> None:
    case = make_case([1], [1024], 1, heads=8, kv_heads=2, dim=64, dtype=torch.float16, cache=cache)
    TritonOps(132).paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    assert "mma.sync" in compiled["decode_kernel"].asm["ptx"]
    assert "ld.global.b8" not in compiled["decode_kernel"].asm["ptx"]


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.float16), (512, torch.bfloat16), (80, torch.float32)])
def test_attention_of_other_shapes(compiled: dict[str, Any], dim: int, dtype: torch.dtype) -> None:
    case = make_case([1, 130], [1024, 150], 1, heads=3, kv_heads=1, dim=dim, dtype=dtype)
    TritonOps(132).paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    assert set(compiled) == {"divide_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"}
    assert all(kernel.metadata.shared <= HOPPER_SHARED_BYTES for kernel in compiled.values())


@pytest.mark.parametrize("latent", [False, True])
def test_e4m3_is_converted_by_the_hardware(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, latent: bool
) -> None:
    monkeypatch.setattr(eight_bits, "hardware_e4m3", lambda device: True)
    if latent:
        case, ops = LatentCase("decodes", torch.bfloat16, cache=FP8), TritonOps(132)
        ops.latent_attention(case.q, case.pool[:, LAYER], case.plan, SCALE, made(ops, torch.bfloat16))
        names: tuple[str, ...] = ("latent_kernel",)
    else:
        batch = make_case([1, 150], [1024, 170], 1, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16, cache=FP8)
        TritonOps(132).paged_attention(batch.q, batch.kv_layer, batch.plan, 0.1)
        names = ("decode_kernel", "prefill_kernel")
    for name in names:
        assert "cvt.rn.f16x2.e4m3x2" in compiled[name].asm["ptx"]
        assert compiled[name].metadata.shared <= HOPPER_SHARED_BYTES
