"""The compiled kernels of every instruction set that this processor runs, against dense or naive oracles in float64."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu import CpuOps, instruction_set, instruction_sets
from kvferry.kernels.layer_norm import LayerNorm
from kvferry.kernels.ops import select
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.paged_batch import (
    ACTIVATIONS,
    GATES,
    LAYER,
    activation_inputs,
    close,
    dense_attention,
    gated,
    make_case,
    rope_table,
    rotate_complex,
    sinks_of,
)

DTYPES = [torch.float32, torch.bfloat16]
SETS = instruction_sets()

pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")


@functools.cache
def made(name: str, threads: int = 2) -> CpuOps:
    return CpuOps(threads, name)


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return made(request.param)


def test_the_portable_set_always_runs_and_the_first_is_chosen() -> None:
    assert SETS[-1] == "portable"
    assert instruction_set() == SETS[0] == CpuOps(1).instruction_set
    assert select("cpu", torch.device("cpu")).name == select("auto", torch.device("cpu")).name == "cpu"
    with pytest.raises(ValueError, match="abacus"):
        CpuOps(1, "abacus")


FEATURES = {
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "avx512": ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx_vnni": ("avx2", "fma", "f16c", "bmi2", "avx_vnni"),
    "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "neon_dotprod": ("asimddp",),
}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the features of this processor are not known")
def test_a_build_for_this_machine_leaves_out_no_set_that_runs_here() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    here = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set[str]())
    assert [name for name, needed in FEATURES.items() if here.issuperset(needed) and name not in SETS] == []


@pytest.mark.skipif("avx512_bf16" not in SETS, reason="this processor has no products of bfloat16")
def test_products_of_bfloat16_are_used_where_they_are_fast() -> None:
    """Intel's are slower than widening to float32."""
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert (SETS.index("avx512_vnni") < SETS.index("avx512_bf16")) == intel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (3, 4, 16), (70, 576)])
def test_norms(ops: CpuOps, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(3)
    x = (torch.randn(shape, generator=random) * 30).to(dtype)
    residual = torch.randn(shape, generator=random).to(dtype)
    weight = torch.randn(shape[-1], generator=random).to(dtype)

    def oracle(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        return value / (value.square().sum(-1, keepdim=True) / shape[-1] + 1e-5).sqrt() * weight.double()

    close(ops.rms_norm(x, weight, 1e-5), oracle(x), dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, oracle(total), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_part_of_each_row(ops: CpuOps, dtype: torch.dtype) -> None:
    wide = torch.randn(5, 3, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.ones(48, dtype=dtype)
    close(ops.rms_norm(wide[:, 1], weight, 1e-5), ReferenceOps().rms_norm(wide[:, 1], weight, 1e-5), dtype)
    close(ops.rms_norm(wide[:, :2], weight, 1e-5), ReferenceOps().rms_norm(wide[:, :2], weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 34), (40, 1536)])
def test_gate_mul(ops: CpuOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, -80.0, 100.0, 0.0])
    for gate in GATES:
        close(ops.gate_mul(gate_up, gate), gated(gate_up, gate), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 17), (40, 1536)])
def test_activate(ops: CpuOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = activation_inputs(shape, dtype)
    for activation, wanted in ACTIVATIONS.items():
        close(ops.activate(x, activation), wanted(x.double()), dtype)
        poisoned = x.clone()
        poisoned[3, 5] = float("nan")
        found = ops.activate(poisoned, activation)
        assert found[3, 5].isnan()
        assert found.isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (33, 40), (3, 19)])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(ops: CpuOps, dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    """Of rows far from 0, too, whose variance a difference of squares would lose."""
    random = torch.Generator().manual_seed(1)
    wide = (torch.randn(shape[0], 2 * shape[1], generator=random) + 20).to(dtype)
    weight, bias = torch.randn(2, shape[1], generator=random).to(dtype)
    x = wide[:, : shape[1]]
    norm = LayerNorm(weight, bias if biased else None)
    plain = torch.nn.functional.layer_norm(x.double(), shape[1:], weight.double(), bias.double() * biased, 1e-5)
    close(ops.layer_norm(x, norm, 1e-5), plain, dtype)


def test_rounding_is_to_nearest_even_and_keeps_nan(ops: CpuOps) -> None:
    random = torch.Generator().manual_seed(8)
    x = (torch.randn(64, 128, generator=random) * 100).bfloat16()
    residual = torch.randn(64, 128, generator=random).bfloat16()
    x[3, 5] = float("nan")
    _, total = ops.add_rms_norm(x, residual, torch.ones(128, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(total.nan_to_num(7), (x + residual).nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (16, 8), (64, 64), (64, 0), (96, 32)])
def test_rope_rotates_and_writes_only_its_slots(ops: CpuOps, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    case = make_case([1, 1, 19], [18, 33, 50], 2, heads=6, kv_heads=2, dim=dim, dtype=dtype)
    qkv = torch.randn(case.plan.num_tokens, 10, dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    cos, sin = rope_table(64, rotary_dim) if rotary_dim else (None, None)
    before = case.pool.clone()
    turned = ops.rope_and_cache(q, k, v, cos, sin, case.kv_layer, case.plan)
    positions = case.plan.positions
    close(turned, rotate_complex(q, positions, rotary_dim) if rotary_dim else q, dtype)
    key = rotate_complex(k, positions, rotary_dim) if rotary_dim else k
    for token, slot in enumerate(case.plan.slots.tolist()):
        written = case.pool[slot // 16, LAYER, :, :, slot % 16]
        close(written[0], key[token], dtype)
        assert torch.equal(written[1], v[token])
        case.pool[slot // 16, LAYER, :, :, slot % 16] = before[slot // 16, LAYER, :, :, slot % 16]
    assert torch.equal(case.pool.nan_to_num(9e4), before.nan_to_num(9e4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (14, 2), (5, 1), (34, 2)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_mixed_batch_equals_dense_attention(
    ops: CpuOps, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    case = make_case(
        [1, 1, 1, 1, 1, 5], [1, 15, 16, 64, 200, 30], 5, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype
    )
    got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.125)
    close(got, dense_attention(case, 0.125), dtype)


def test_a_head_dim_that_fills_no_vector_is_left_to_the_reference(ops: CpuOps) -> None:
    case = make_case([1, 1], [30, 5], 2, dim=8)
    close(ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25), dense_attention(case, 0.25), torch.float32)


def test_long_sequences_are_cut_into_chunks(ops: CpuOps) -> None:
    case = make_case([1, 1], [2100, 1025], 2, heads=4, kv_heads=2, dim=32)
    for window in (0, 1500, -1000):
        got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.2, window)
        close(got, dense_attention(case, 0.2, window), torch.float32)


@pytest.mark.parametrize("heads", [6, 34])
def test_a_row_does_not_depend_on_its_batch_or_on_the_threads(heads: int) -> None:
    case = make_case([1, 1, 1], [700, 90, 333], 3, heads=heads, kv_heads=2, dim=64, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 5):
        ops = made(SETS[0], threads)
        results.append(ops.paged_attention(case.q, case.kv_layer, case.plan, 0.2))
    assert all(torch.equal(results[0], other) for other in results[1:])
    alone = make_case([1], [700], 1, heads=heads, kv_heads=2, dim=64, dtype=torch.bfloat16)
    count = 700 // 16 + 1
    alone.pool[alone.plan.block_table[0, :count].long()] = case.pool[case.plan.block_table[0, :count].long()]
    got = made(SETS[0]).paged_attention(case.q[:1].clone(), alone.kv_layer, alone.plan, 0.2)
    assert torch.equal(got, results[0][:1])


@settings(max_examples=25, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), max_size=2),
    window=st.sampled_from([0, 0, 1, 5, 33, -1, -12, -33]),
    block_size=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 3, 4]),
    name=st.sampled_from(SETS or ["none"]),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_dense_attention(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    window: int,
    block_size: int,
    group: int,
    name: str,
    seed: int,
) -> None:
    query_lens = [1] * len(decodes) + [query_len for query_len, _ in chunks]
    total_lens = decodes + [query_len + computed_len for query_len, computed_len in chunks]
    case = make_case(query_lens, total_lens, len(decodes), heads=2 * group, block_size=block_size, seed=seed)
    got = made(name).paged_attention(case.q, case.kv_layer, case.plan, 0.25, window)
    close(got, dense_attention(case, 0.25, window), torch.float32)


def test_half_precision_goes_to_the_reference(ops: CpuOps) -> None:
    case = make_case([1, 3], [20, 9], 1, dtype=torch.float16)
    close(ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25), dense_attention(case, 0.25), torch.float16)
    x = torch.ones(2, 64, dtype=torch.float16)
    assert ops.linear(torch.ones(3, 64, dtype=torch.float16))(x).tolist() == [[64] * 3] * 2


def test_many_runs_of_more_threads_than_cores_end_and_agree() -> None:
    case = make_case([1] * 4, [65, 130, 7, 300], 4, dim=32)
    ops = made(SETS[0], 5)
    first = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25)
    for _ in range(300):
        assert torch.equal(first, ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores of threads cannot be chosen here")
def test_threads_that_spread_keep_to_the_cores_of_their_caller() -> None:
    """Of a team that is kept on one core, members find each other there at every barrier."""
    before = os.sched_getaffinity(0)
    x, weight = torch.randn(300, 2048), torch.ones(2048)
    try:
        os.sched_setaffinity(0, {min(before)})
        alone, ops = CpuOps(1), CpuOps(3)
        for _ in range(20):
            assert torch.equal(ops.rms_norm(x, weight, 1e-5), alone.rms_norm(x, weight, 1e-5))
            assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_tensors_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    case = make_case([1], [20], 1)
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="dtype"):
        ops.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="shape"):
        ops.rms_norm(x, torch.ones(32), 1e-5)
    with pytest.raises(ValueError, match="fit the cache"):
        ops.paged_attention(case.q[:, :5].contiguous(), case.kv_layer, case.plan, 0.25)
    with pytest.raises(ValueError, match="layout"):
        ops.paged_attention(case.q, case.kv_layer.transpose(-1, -2), case.plan, 0.25)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("window", [0, 1, 40, 150, -1, -40, -128])
def test_prefill_equals_dense_attention(ops: CpuOps, heads: int, kv_heads: int, dim: int, window: int) -> None:
    case = make_case(
        [1, 70, 1, 33], [40, 70, 300, 293], 1, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16
    )
    got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.125, window)
    close(got, dense_attention(case, 0.125, window), torch.bfloat16)


@pytest.mark.parametrize("window", [0, 100, -150])
def test_chunks_of_a_prompt_give_what_one_pass_gives(window: int) -> None:
    whole = make_case([330], [330], 0, heads=6, dim=64, dtype=torch.bfloat16)
    expected = made(SETS[0]).paged_attention(whole.q, whole.kv_layer, whole.plan, 0.125, window)
    for cut in (1, 127, 128, 255, 256, 329):
        for begin, end in ((0, cut), (cut, 330)):
            part = replace(
                whole.plan,
                positions=whole.plan.positions[begin:end],
                slots=whole.plan.slots[begin:end],
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                total_len=torch.tensor([end], dtype=torch.int32),
                query_lens=(end - begin,),
                total_lens=(end,),
            )
            for threads in (1, 3):
                got = made(SETS[0], threads).paged_attention(whole.q[begin:end], whole.kv_layer, part, 0.125, window)
                assert torch.equal(got, expected[begin:end])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("window", [0, 16, 150, -48])
@pytest.mark.parametrize(("cap", "sunk"), [(0.7, False), (0.0, True), (0.7, True)])
@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("heads", [6, 34])
def test_soft_caps_and_sinks(
    name: str, window: int, cap: float, sunk: bool, dtype: torch.dtype, int8: bool, heads: int
) -> None:
    """In decodes of one chunk and of several, in prompts of one block and of several."""
    case = make_case(
        [1, 1, 1, 17, 140, 5],
        [1, 16, 300, 17, 300, 405],
        3,
        heads=heads,
        kv_heads=2,
        dim=32,
        dtype=dtype,
        cache=torch.int8 if int8 else None,
    )
    sinks = sinks_of(case) if sunk else None
    wanted = dense_attention(case, 0.25, window, cap, sinks)
    assert (wanted - dense_attention(case, 0.25, window)).abs().max() > 0.05, "caps and sinks must matter"
    for invariant in (False, True):
        ops = CpuOps(2, name, batch_invariant=invariant)
        close(ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25, window, cap, sinks), wanted, dtype)


def test_sinks_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    for query_len in (1, 3):
        case = make_case([query_len], [20], int(query_len == 1), dim=32, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="one per query head"):
            ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25, 0, 0.0, torch.zeros(5))
