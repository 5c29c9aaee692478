"""Every operation of the reference against a dense or naive oracle in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.batch_index import BatchIndex, block_rows
from kvferry.kernels.reference import ReferenceOps
from tests.kernels.paged_batch import (
    ACTIVATIONS,
    GATES,
    LAYER,
    Case,
    activation_inputs,
    close,
    dense_attention,
    gated,
    make_case,
    rope_table,
    rotate_complex,
    sinks_of,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(case: Case, scale: float = 0.25, window: int = 0) -> torch.Tensor:
    return ReferenceOps().paged_attention(case.q, case.kv_layer, case.plan, scale, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 2), (4, 1)])
def test_mixed_batch_equals_dense_attention(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    case = make_case(
        [1, 1, 1, 1, 1, 17, 5], [1, 15, 16, 17, 100, 17, 60], 5, heads=heads, kv_heads=kv_heads, dtype=dtype
    )
    close(attend(case), dense_attention(case, 0.25), dtype)


@pytest.mark.parametrize("window", [1, 7, 16, 40, 500, -1, -7, -16, -40, -500])
def test_windows_and_chunks(window: int) -> None:
    case = make_case([1, 1, 1, 20, 33], [100, 5, 41, 20, 97], 3)
    close(attend(case, window=window), dense_attention(case, 0.25, window), torch.float32)


@pytest.mark.parametrize("total_lens", [[48], [50], [50, 50], [64, 64, 64], [49, 64]])
def test_decodes_of_one_bucket(total_lens: list[int]) -> None:
    case = make_case([1] * len(total_lens), total_lens, len(total_lens))
    close(attend(case), dense_attention(case, 0.25), torch.float32)


def test_decodes_of_interleaved_buckets_keep_their_order() -> None:
    total_lens = [100, 3, 90, 4, 120, 30]
    case = make_case([1] * 6, total_lens, 6)
    groups = BatchIndex(case.plan, case.kv_layer).groups(0, torch.float32)
    assert sorted(group.count for group in groups) == [1, 2, 3]
    close(attend(case), dense_attention(case, 0.25), torch.float32)


def test_one_token_chunks_behind_the_decodes() -> None:
    case = make_case([1, 1, 1, 2], [30, 1, 31, 2], 1)
    close(attend(case), dense_attention(case, 0.25), torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 70), max_size=5),
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), max_size=3),
    window=st.sampled_from([0, 0, 1, 5, 33, -1, -12, -33]),
    block_size=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_dense_attention(
    decodes: list[int], chunks: list[tuple[int, int]], window: int, block_size: int, group: int, seed: int
) -> None:
    if not decodes and not chunks:
        decodes = [1]
    query_lens = [1] * len(decodes) + [query_len for query_len, _ in chunks]
    total_lens = decodes + [query_len + computed_len for query_len, computed_len in chunks]
    case = make_case(query_lens, total_lens, len(decodes), heads=2 * group, dim=8, block_size=block_size, seed=seed)
    close(attend(case, window=window), dense_attention(case, 0.25, window), torch.float32)


def test_chunks_give_what_one_pass_gives() -> None:
    whole = make_case([40], [40], 0)
    expected = attend(whole)
    for cut in (1, 15, 16, 17, 39):
        for begin, end in ((0, cut), (cut, 40)):
            chunk = replace(
                whole.plan,
                positions=whole.plan.positions[begin:end],
                slots=whole.plan.slots[begin:end],
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                total_len=torch.tensor([end], dtype=torch.int32),
                query_lens=(end - begin,),
                total_lens=(end,),
            )
            part = ReferenceOps().paged_attention(whole.q[begin:end], whole.kv_layer, chunk, 0.25)
            close(part, expected[begin:end], torch.float32)


def test_a_new_plan_replaces_the_index_of_the_last() -> None:
    ops = ReferenceOps()
    for case in (make_case([1, 3], [9, 3], 1), make_case([1, 3], [20, 30], 1, seed=7)):
        for window in (0, 4):
            got = ops.paged_attention(case.q, case.kv_layer, case.plan, 0.25, window)
            close(got, dense_attention(case, 0.25, window), torch.float32)


def test_a_pool_of_other_strides_is_refused_or_read_right() -> None:
    case = make_case([1], [20], 1)
    alone = replace(case, pool=case.pool[:, LAYER : LAYER + 1].clone())
    got = ReferenceOps().paged_attention(case.q, alone.pool[:, 0], case.plan, 0.25)
    close(got, dense_attention(case, 0.25), torch.float32)
    with pytest.raises(AssertionError, match="dense"):
        block_rows(case.kv_layer.transpose(-1, -2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8, 0])
def test_rope_rotates_and_writes_only_its_slots(dtype: torch.dtype, rotary_dim: int) -> None:
    case = make_case([1, 1, 19], [18, 33, 50], 2, heads=6, kv_heads=2, dtype=dtype)
    random = torch.Generator().manual_seed(5)
    qkv = torch.randn(case.plan.num_tokens, 10, 16, generator=random).to(dtype)
    q, k, v = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    cos, sin = rope_table(64, rotary_dim) if rotary_dim else (None, None)
    before = case.pool.clone()
    turned = ReferenceOps().rope_and_cache(q, k, v, cos, sin, case.kv_layer, case.plan)
    positions = case.plan.positions
    close(turned, rotate_complex(q, positions, rotary_dim) if rotary_dim else q, dtype)
    key = rotate_complex(k, positions, rotary_dim) if rotary_dim else k
    for token, slot in enumerate(case.plan.slots.tolist()):
        written = case.pool[slot // 16, LAYER, :, :, slot % 16]
        close(written[0], key[token], dtype)
        assert torch.equal(written[1], v[token])
        case.pool[slot // 16, LAYER, :, :, slot % 16] = before[slot // 16, LAYER, :, :, slot % 16]
    assert torch.equal(case.pool.nan_to_num(9e4), before.nan_to_num(9e4))


def test_two_rope_tables_in_one_batch_do_not_mix() -> None:
    case = make_case([1], [18], 1)
    ops = ReferenceOps()
    k = torch.zeros(1, 2, 16)
    cos, sin = rope_table(64, 16)
    still = (torch.ones_like(cos), torch.zeros_like(sin))
    for _ in range(2):
        close(ops.rope_and_cache(case.q, k, k, *still, case.kv_layer, case.plan), case.q, torch.float32)
        got = ops.rope_and_cache(case.q, k, k, cos, sin, case.kv_layer, case.plan)
        close(got, rotate_complex(case.q, case.plan.positions, 16), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (3, 4, 16)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(3)
    x = (torch.randn(shape, generator=random) * 30).to(dtype)
    residual = torch.randn(shape, generator=random).to(dtype)
    weight = torch.randn(shape[-1], generator=random).to(dtype)

    def oracle(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        return value / (value.square().sum(-1, keepdim=True) / shape[-1] + 1e-5).sqrt() * weight.double()

    close(ReferenceOps().rms_norm(x, weight, 1e-5), oracle(x), dtype)
    normed, total = ReferenceOps().add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, oracle(total), dtype)


def test_norm_of_large_half_values_does_not_overflow() -> None:
    x = torch.full((2, 64), 1000.0, dtype=torch.float16)
    close(ReferenceOps().rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones(2, 64), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_mul_takes_the_gate_first(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 34, generator=torch.Generator().manual_seed(4)).to(dtype)
    for gate in GATES:
        close(ReferenceOps().gate_mul(gate_up, gate), gated(gate_up, gate), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activate(dtype: torch.dtype) -> None:
    x = activation_inputs((5, 34), dtype)
    for activation, wanted in ACTIVATIONS.items():
        close(ReferenceOps().activate(x, activation), wanted(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("decodes", [3, 1])
def test_soft_caps(dtype: torch.dtype, window: int, decodes: int) -> None:
    lens, totals = [1, 1, 1, 17, 5][3 - decodes :], [1, 16, 100, 17, 30][3 - decodes :]
    case = make_case(lens, totals, decodes, heads=6, kv_heads=2, dtype=dtype)
    wanted = dense_attention(case, 0.25, window, 0.7)
    close(ReferenceOps().paged_attention(case.q, case.kv_layer, case.plan, 0.25, window, 0.7), wanted, dtype)
    assert (wanted - dense_attention(case, 0.25, window)).abs().max() > 0.05, "the cap must matter"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (16, 0.0), (0, 0.7)])
@pytest.mark.parametrize("decodes", [3, 1])
def test_sinks(dtype: torch.dtype, window: int, cap: float, decodes: int) -> None:
    lens, totals = [1, 1, 1, 17, 5][3 - decodes :], [1, 16, 100, 17, 30][3 - decodes :]
    case = make_case(lens, totals, decodes, heads=6, kv_heads=2, dtype=dtype)
    sinks = sinks_of(case)
    wanted = dense_attention(case, 0.25, window, cap, sinks)
    close(ReferenceOps().paged_attention(case.q, case.kv_layer, case.plan, 0.25, window, cap, sinks), wanted, dtype)
    assert (wanted - dense_attention(case, 0.25, window, cap)).abs().max() > 0.3, "sinks must matter"
