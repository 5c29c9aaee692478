"""The choice of tiles and splits."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvferry.kernels.triton.tile_sizes import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    PROGRAMS_PER_PROCESSOR,
    amd_tile,
    decode_tile,
    latent_tile,
    power_of_two,
    prefill_tile,
    product_splits,
    spare_parts,
)

HOPPER = 132


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"),
    [
        (8, 128, 32),
        (8, 16, 8),
        (8, 1, 1),
        (8, 10_000, 32),
        (1, 10_000, MAX_SPLITS),
        (256, 128, 1),
        (131, 128, 2),
        (0, 0, 1),
    ],
)
def test_splits_on_a_hopper(programs: int, tiles: int, expected: int) -> None:
    assert product_splits(programs, tiles, HOPPER) == expected


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 200))
def test_splits_keep_their_bounds(programs: int, tiles: int, processors: int) -> None:
    splits = product_splits(programs, tiles, processors)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert splits * MIN_TILES_PER_SPLIT <= tiles
        assert splits * programs <= processors * PROGRAMS_PER_PROCESSOR


@pytest.mark.parametrize(("heads", "expected"), [(1, 1056), (8, 132), (128, 8), (2000, 1)])
def test_parts_that_a_hopper_can_spare(heads: int, expected: int) -> None:
    assert spare_parts(heads, HOPPER) == expected


@given(st.integers(0, 10_000), st.sampled_from([1, 16]))
def test_power_of_two_is_the_smallest(n: int, least: int) -> None:
    power = power_of_two(n, least)
    assert power & (power - 1) == 0
    assert power >= max(n, least)
    assert power == least or power // 2 < n


@given(st.integers(1, 128), st.integers(1, 512), st.sampled_from([2, 4]), st.integers(0, 10_000))
def test_tiles_suit_tensor_cores_and_shared_memory(group: int, dim: int, element_bytes: int, rows: int) -> None:
    assume(dim <= 256 or group <= 32)  # no model has wider heads in larger groups
    kinds = [prefill_tile(rows, dim, element_bytes, coded=coded, tall=not coded) for coded in (False, True)]
    for tile in (decode_tile(group, dim, element_bytes), *kinds):
        for side in (tile.rows, tile.keys, tile.dim):
            assert side >= 16
            assert side & (side - 1) == 0
        assert tile.dim >= dim
        pipelined = 2 * tile.keys * tile.dim * element_bytes * tile.stages
        assert pipelined + tile.rows * tile.dim * element_bytes <= 227 * 1024
    assert decode_tile(group, dim, element_bytes).rows >= group


@given(st.integers(1, 128), st.integers(1, 512), st.sampled_from([2, 4]), st.integers(0, 10_000))
def test_tiles_on_amd_fit_the_shared_memory_of_gfx942(group: int, dim: int, element_bytes: int, rows: int) -> None:
    kinds = [
        decode_tile(group, dim, element_bytes),
        latent_tile(dim, element_bytes),
        *(prefill_tile(rows, dim, element_bytes, coded=coded) for coded in (False, True)),
    ]
    for kind in kinds:
        tile = amd_tile(kind, element_bytes)
        assert 16 <= tile.keys <= kind.keys
        assert (tile.rows, tile.dim) == (kind.rows, kind.dim)
        assert 2 * tile.keys * tile.dim * element_bytes <= 32 * 1024 * (1 if tile.stages == 2 else 2)
        assert tile.warps * 64 <= 1024
