"""Each Triton operation against the reference. Collected by test_triton_attention.py in a process of its own, because
Triton decides at its import whether it interprets; on a machine with a CUDA device the kernels run for real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvferry.kernels.decoder_spec import Experts, Gated
from kvferry.kernels.expert_routing import Routing
from kvferry.kernels.experts import mixture
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.torch_operations import grouped_by_torch
from kvferry.kernels.triton import TritonOps
from kvferry.kernels.triton.checksum import digests
from kvferry.kernels.triton.decode import decode
from kvferry.kernels.triton.split_kv import Division
from kvferry.kernels.triton.tile_sizes import decode_tile, prefill_tile
from kvferry.protocol.attention_window import first_seen
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.paged_batch import (
    ACTIVATIONS,
    GATES,
    Case,
    activation_inputs,
    close,
    dense_attention,
    gated,
    make_case,
    rope_table,
    seeing_ahead,
    sinks_of,
)
from tests.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(
    case: Case, window: int = 0, processors: int = 1, cap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    moved, sinks = case.to(DEVICE), None if sinks is None else sinks.to(DEVICE)
    return TritonOps(processors).paged_attention(moved.q, moved.kv_layer, moved.plan, 0.25, window, cap, sinks).cpu()


@pytest.mark.parametrize(("dtype", "window", "processors"), pairwise(DTYPES, [0, 16], [1, 8]))
def test_soft_caps(dtype: torch.dtype, window: int, processors: int) -> None:
    case = make_case([1, 1, 1, 17, 5], [1, 16, 100, 17, 30], 3, heads=6, kv_heads=2, dtype=dtype)
    wanted = dense_attention(case, 0.25, window, 0.7)
    assert (wanted - dense_attention(case, 0.25, window)).abs().max() > 0.05, "the cap must matter"
    close(attend(case, window, processors, 0.7), wanted, dtype)


@pytest.mark.parametrize(("dtype", "masked", "processors"), pairwise(DTYPES, [(0, 0.0), (16, 0.0), (0, 0.7)], [1, 8]))
def test_sinks(dtype: torch.dtype, masked: tuple[int, float], processors: int) -> None:
    """masked: window and cap."""
    window, cap = masked
    case = make_case([1, 1, 1, 17, 5], [1, 16, 100, 17, 30], 3, heads=6, kv_heads=2, dtype=dtype)
    sinks = sinks_of(case)
    close(attend(case, window, processors, cap, sinks), dense_attention(case, 0.25, window, cap, sinks), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (4, 1)])
def test_mixed_batch(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    case = make_case(
        [1, 1, 1, 1, 1, 17, 5], [1, 15, 16, 17, 100, 17, 30], 5, heads=heads, kv_heads=kv_heads, dtype=dtype
    )
    close(attend(case), dense_attention(case, 0.25), dtype)


@pytest.mark.parametrize("window", [0, 16])
def test_images_see_later_tokens(window: int) -> None:
    """The second image is longer than a tile of rows and of keys, and begins before the chunk's first tile ends."""
    case = make_case([1, 30, 150], [40, 57, 190], 1, heads=4, kv_heads=2)
    case = seeing_ahead(case, [(5, 17), (35, 170)])
    close(attend(case, window), dense_attention(case, 0.25, window), torch.float32)


@pytest.mark.parametrize("window", [1, 16, 70, -1, -16, -60])
@pytest.mark.parametrize("processors", [1, 8])
def test_window(window: int, processors: int) -> None:
    case = make_case([1, 1, 30], [140, 5, 97], 2, heads=3, kv_heads=1)
    close(attend(case, window, processors), dense_attention(case, 0.25, window), torch.float32)


def test_rows_whose_window_begins_behind_the_first_tile() -> None:
    case = make_case([128], [130], 0, heads=1, kv_heads=1, dtype=torch.float16)
    tile = prefill_tile(128, 16, 2)
    assert tile.rows > tile.keys
    close(attend(case, window=4), dense_attention(case, 0.25, 4), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spare", [1, 8])
def test_decodes_in_parts_write_their_own_rows_alone(dtype: torch.dtype, spare: int) -> None:
    case = make_case([1, 1, 2], [140, 1, 2], 2, heads=3, kv_heads=1, dtype=dtype)
    moved = case.to(DEVICE)
    tile = decode_tile(3, 16, moved.q.element_size())
    for sinks in (None, sinks_of(case)):
        out, given = torch.zeros_like(moved.q), None if sinks is None else sinks.to(DEVICE)
        division = Division(moved.plan.total_len[:2], tile.keys, spare)
        decode(moved.q, moved.kv_layer, out, moved.plan, 0.25, 0, 0.0, given, division, tile)
        close(out[:2].cpu(), dense_attention(case, 0.25, sinks=sinks)[:2], dtype)
        assert not out[2:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70, 300, -400])
def test_one_long_sequence_among_short_ones(dtype: torch.dtype, window: int) -> None:
    """It has parts, they have none."""
    case = make_case([1] * 20, [1, 900, *[17] * 18], 20, heads=2, kv_heads=1, dtype=dtype)
    close(attend(case, window, 4), dense_attention(case, 0.25, window), dtype)


@pytest.mark.parametrize("count", [1, 3, 700])
def test_experts_as_grouped_products_on_the_device(count: int) -> None:
    numbers, hidden, inner, experts = torch.Generator().manual_seed(3), 256, 384, 16
    shapes = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (count, hidden))
    made = [torch.randn(shape, generator=numbers).mul(0.1).bfloat16().to(DEVICE) for shape in shapes]
    ops, (router, gate_up, down, x) = ReferenceOps(), made
    each = tuple(Gated(ops.linear(a), ops.linear(b)) for a, b in zip(gate_up, down, strict=True))
    plain = Experts(ops.linear(router), each, Routing(4))
    wanted = mixture(plain, x, ops.gate_mul)
    got = mixture(replace(plain, grouped=grouped_by_torch(each)), x, ops.gate_mul)
    assert (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("window", [0, 1, 100, 5000, -1, -100])
@pytest.mark.parametrize("spare", [1, 7, 132])
@pytest.mark.parametrize("lengths", [[1], [4096], [100_000, *[30] * 63], [2048] * 64, [*range(1, 129)], [16 * 64, 65]])
def test_parts_are_of_about_one_size_and_have_each_position_once(lengths: list[int], spare: int, window: int) -> None:
    keys, total = 16, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    division = Division(total, keys, spare, window)
    count, items, spans = int(division.items[0, 0]), division.items[1:].cpu(), division.spans.cpu()
    assert len(lengths) <= count <= division.count == len(lengths) + spare
    first = [first_seen(length - 1, window) for length in lengths]
    assert sorted(items[:count, 0].tolist()) == items[:count, 0].tolist()
    for seq, (length, (before, parts)) in enumerate(zip(lengths, spans.tolist(), strict=True)):
        own = items[before : before + parts]
        assert own[:, 0].tolist() == [seq] * parts
        assert own[:, 3].tolist() == list(range(parts))
        assert own[:, 1].tolist() == [first[seq], *own[:-1, 2].tolist()]
        assert int(own[-1, 2]) == length
        assert bool((own[:, 2] > own[:, 1]).all())
    largest = int((items[:count, 2] - items[:count, 1]).max())
    work = sum(length - begin for length, begin in zip(lengths, first, strict=True)) + keys * len(lengths)
    assert largest <= max(2 * keys, work / spare + keys)


@pytest.mark.parametrize("dim", [24, 80])
@pytest.mark.parametrize("block_size", [4, 16])
def test_head_dims_that_are_no_power_of_two(dim: int, block_size: int) -> None:
    case = make_case([1, 9], [200, 40], 1, heads=3, kv_heads=1, dim=dim, block_size=block_size)
    close(attend(case, processors=4), dense_attention(case, 0.25), torch.float32)


def test_chunk_of_several_tiles_behind_a_prefix() -> None:
    case = make_case([70, 3], [95, 3], 0, heads=3, kv_heads=1)
    close(attend(case), dense_attention(case, 0.25), torch.float32)


def test_large_negative_scores_do_not_vanish() -> None:
    case = make_case([1, 4], [90, 40], 1, heads=1, kv_heads=1)
    far = replace(case, q=case.q * 400)
    close(attend(far, processors=4), dense_attention(far, 0.25), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 12, 0])
def test_rope_and_cache(dtype: torch.dtype, rotary_dim: int) -> None:
    case = make_case([1, 1, 4], [18, 33, 50], 2, heads=3, kv_heads=1, dtype=dtype)
    random = torch.Generator().manual_seed(5)
    qkv = torch.randn(case.plan.num_tokens, 5, 16, generator=random).to(dtype)
    cos, sin = rope_table(64, rotary_dim) if rotary_dim else (None, None)
    outcomes = []
    for ops, device in ((ReferenceOps(), "cpu"), (TritonOps(), DEVICE)):
        moved = replace(case, pool=case.pool.clone()).to(device)
        cosines, sines = (None if t is None else t.to(device) for t in (cos, sin))
        q, k, v = qkv.to(device).split((3, 1, 1), 1)
        turned = ops.rope_and_cache(q, k, v, cosines, sines, moved.kv_layer, moved.plan)
        outcomes.append((turned.cpu(), moved.pool.cpu()))
    (expected, expected_pool), (got, got_pool) = outcomes
    close(got, expected, dtype)
    assert torch.equal(got_pool.isnan(), expected_pool.isnan())
    close(got_pool.nan_to_num(), expected_pool.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 576), (5, 33), (2, 3, 16)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(3)
    wide = (torch.randn((*shape[:-1], 2 * shape[-1]), generator=random) * 30).to(dtype).to(DEVICE)
    x, residual = wide.split(shape[-1], -1)
    weight = torch.randn(shape[-1], generator=random).to(dtype).to(DEVICE)
    close(TritonOps().rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5), dtype)
    normed, total = TritonOps().add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = ReferenceOps().add_rms_norm(x, residual, weight, 1e-5)
    close(total, expected_total, dtype)
    close(normed, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [34, 5000])
def test_gate_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(2, width, generator=torch.Generator().manual_seed(4)).to(dtype).to(DEVICE)
    for gate in GATES:
        close(TritonOps().gate_mul(gate_up, gate).cpu(), gated(gate_up.cpu(), gate), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [34, 2500])
def test_activate(dtype: torch.dtype, width: int) -> None:
    x = activation_inputs((2, width), dtype)
    for activation, wanted in ACTIVATIONS.items():
        close(TritonOps().activate(x.to(DEVICE), activation).cpu(), wanted(x.double()), dtype)


@pytest.mark.parametrize("size", [64, 241, 248, 256, 1023, 1024, 1032, 1088, 2048, 5000, 49_152])
def test_checksums_are_those_of_the_library(size: int) -> None:
    pool = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    moved = pool.to(DEVICE)
    assert digests([moved[2], moved[0]]) == [xxh3_64_intdigest(pool[block].numpy().data) for block in (2, 0)]


def test_the_benchmark_of_checksums_times_right_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_checksums

    bench = vars(gpu_checksums)
    given = bench["batch"](2, 1280, torch.device(DEVICE), 7680)
    assert (len(given.blocks), given.count, given.title) == (6, 2, "checksums of 2 x 1.25 KiB")
    forms = (bench["whole"], bench["whole"], bench["on_host"])
    words = bench["line"](given, forms, lambda: 1e9, 1).split()
    assert len(words) == 14
    monkeypatch.setattr(gpu_checksums, "digests", lambda blocks: [0] * len(blocks))
    with pytest.raises(AssertionError, match="checksums of 2"):
        bench["line"](given, forms, lambda: 1e9, 1)
