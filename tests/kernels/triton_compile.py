"""Every kernel compiled for a Hopper GPU, without one: a driver that only names its target stands in for CUDA's, and
launches stop after the compiler. Collected by test_triton.py in a process of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from paged_batch import GATES, make_case, rope_table, sinks_of
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.draw import NoiseKeys
from kernels.triton import TritonOps
from kernels.triton.checksum import digests
from protocol.sampling import SamplingParams

HOPPER_SHARED_BYTES = 227 * 1024


class NamedTarget:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compiled kernels by name."""
    found: dict[str, Any] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        found[kernel.__name__] = kernel.run(*args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: partial(compile_only, kernel, grid=grid))
    driver.set_active(NamedTarget())
    return found


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (512, 0.0), (512, 50.0)])
@pytest.mark.parametrize("sunk", [False, True])
def test_bfloat16_attention_uses_tensor_cores_and_wide_copies(
    compiled: dict[str, Any], window: int, cap: float, sunk: bool
) -> None:
    case = make_case([1, 1, 150], [1024, 30, 170], 2, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16)
    sinks = sinks_of(case) if sunk else None
    TritonOps(132).paged_attention(case.q, case.kv_layer, case.plan, 0.1, window, cap, sinks)
    assert set(compiled) == {"decode_kernel", "merge_kernel", "prefill_kernel"}
    assert "mma.sync" in compiled["decode_kernel"].asm["ptx"]
    assert "wgmma" in compiled["prefill_kernel"].asm["ptx"]
    for name in ("decode_kernel", "prefill_kernel"):
        assert "cp.async.cg" in compiled[name].asm["ptx"]
        assert compiled[name].metadata.shared <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.float16), (80, torch.float32)])
def test_attention_of_other_shapes(compiled: dict[str, Any], dim: int, dtype: torch.dtype) -> None:
    case = make_case([1, 130], [1024, 150], 1, heads=3, kv_heads=1, dim=dim, dtype=dtype)
    TritonOps(132).paged_attention(case.q, case.kv_layer, case.plan, 0.1)
    assert set(compiled) == {"decode_kernel", "merge_kernel", "prefill_kernel"}
    assert all(kernel.metadata.shared <= HOPPER_SHARED_BYTES for kernel in compiled.values())


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
    assert set(compiled) == {"rope_cache_kernel", "rms_norm_kernel", "gate_mul_kernel"}


def test_checksums(compiled: dict[str, Any]) -> None:
    digests([torch.zeros(5000, dtype=torch.uint8)])
    assert set(compiled) == {"sums_kernel", "scramble_kernel"}


def test_draws(compiled: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.1)]
    TritonOps().draw(torch.zeros(1, 128_256), params, NoiseKeys((1,), (1,)))
    assert set(compiled) == {"draw_kernel"}
