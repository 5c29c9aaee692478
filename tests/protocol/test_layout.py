"""Sizes of a block, and the fingerprint that keeps unlike pools apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol import layout
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import CachedLayer, KVLayout

DEMO = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_known_block_sizes() -> None:
    assert DEMO.block_bytes == 368_640
    llama_8b = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert llama_8b.block_bytes == 2 * 2**20
    assert replace(llama_8b, dtype="float32").block_bytes == 4 * 2**20


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_vectors_of_8_bits_carry_their_scales(dtype: str) -> None:
    layout = replace(DEMO, dtype=dtype)
    assert layout.block_shape == (30, 2, 3, 16, 68)
    assert layout.block_bytes == 30 * 2 * 3 * 16 * 68 == 195_840


def test_latents_are_kept_in_fp8_and_not_in_int8() -> None:
    latents = KVLayout(61, 1, 576, "float8_e4m3fn", planes=1)
    assert latents.block_bytes == 61 * 16 * 580
    assert latents.fingerprint("rev") != replace(latents, dtype="bfloat16").fingerprint("rev")
    with pytest.raises(ConfigError, match="kv_cache_dtype int8 is not supported for latent attention; use auto or fp8"):
        replace(latents, dtype="int8")


@given(st.integers(0, 10**6), st.integers(1, 256))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(tokens: int, size: int) -> None:
    blocks = replace(DEMO, block_size=size).blocks_for(tokens)
    assert (blocks - 1) * size < tokens <= blocks * size


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 9},
        {"head_dim": 32},
        {"dtype": "float16"},
        {"block_size": 32},
        {"planes": 1},
    ],
)
def test_every_field_is_in_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(DEMO, **change).fingerprint("rev") != DEMO.fingerprint("rev")


def test_revision_and_wire_version_are_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DEMO.fingerprint("rev")
    assert before == DEMO.fingerprint("rev")
    assert len(before) == 32
    assert DEMO.fingerprint("other") != before
    assert DEMO.fingerprint("rev", "float32") != before
    monkeypatch.setattr(layout, "WIRE_VERSION", layout.WIRE_VERSION + 1)
    assert DEMO.fingerprint("rev") != before


def test_a_block_of_layers_that_differ_is_all_their_parts() -> None:
    layers = (CachedLayer(2, 64), CachedLayer(1, 128), CachedLayer(2, 64))
    mixed = KVLayout(3, 2, 64, "bfloat16", 16, layers=layers)
    assert mixed.numbers == 16 * 2 * (2 * 64 + 128 + 2 * 64)
    assert mixed.block_shape == (mixed.numbers,)
    assert mixed.block_bytes == 2 * mixed.numbers
    assert replace(mixed, dtype="int8").block_bytes == 16 * 2 * (2 * 68 + 132 + 2 * 68)
    assert mixed.of_rank(1) == mixed
    alike = replace(mixed, layers=())
    orders = [mixed, alike, replace(mixed, layers=layers[::-1][1:] + layers[:1])]
    assert len({each.fingerprint("rev") for each in orders}) == 3


def test_the_fingerprint_of_layers_that_are_alike_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What disks and stores hold under it is found again after an upgrade."""
    monkeypatch.setattr(layout, "WIRE_VERSION", 13)
    assert DEMO.fingerprint("rev", "cpu") == "123a9ff79c25426704ef96e543a7a749"
