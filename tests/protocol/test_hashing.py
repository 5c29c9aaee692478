"""Chained block hashes: router and engine must agree on them byte for byte."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.hashing import HASH_BYTES, block_hash, chain, root_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ROOT = root_hash("f" * 32)


def test_the_hash_is_the_documented_formula() -> None:
    tokens = [1, 300, 49151, 2**31 - 1]
    expected = hashlib.sha256(ROOT + struct.pack("<4i", *tokens)).digest()[:HASH_BYTES]
    assert block_hash(ROOT, tokens) == expected
    assert len(expected) == 16


@given(TOKENS, st.integers(1, 8))
def test_chain_covers_the_full_blocks_and_each_hash_depends_on_its_parent(tokens: list[int], size: int) -> None:
    hashes = chain(ROOT, tokens, size)
    assert len(hashes) == len(tokens) // size
    parents = [ROOT, *hashes]
    for i, digest in enumerate(hashes):
        assert digest == block_hash(parents[i], tokens[i * size : (i + 1) * size])


@given(TOKENS, st.integers(1, 8), st.data())
def test_continuing_from_known_hashes_changes_nothing(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole = chain(ROOT, tokens, size)
    known = data.draw(st.integers(0, len(whole)))
    assert chain(ROOT, tokens, size, known=whole[:known]) == whole


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(left: list[int], right: list[int], size: int) -> None:
    blocks = zip(chain(ROOT, left, size), chain(ROOT, right, size), strict=False)
    for i, (a, b) in enumerate(blocks, start=1):
        assert (a == b) == (left[: i * size] == right[: i * size])


def test_tenant_model_and_extras_separate_equal_tokens() -> None:
    roots = {root_hash("a"), root_hash("b"), root_hash("a", "tenant"), root_hash("a", "other")}
    roots |= {root_hash("a", adapter="x"), root_hash("a", adapter="y"), root_hash("a", "tenant", "x")}
    assert len(roots) == 7
    assert len({block_hash(ROOT, [1, 2]), block_hash(ROOT, [1, 2], b"x"), block_hash(ROOT, [1, 2], b"y")}) == 3


@given(TOKENS, st.integers(1, 8), st.dictionaries(st.integers(0, 8), st.binary(min_size=1, max_size=3)), st.data())
def test_extras_of_a_block_change_its_hash_and_all_behind_it(
    tokens: list[int], size: int, extras: dict[int, bytes], data: st.DataObject
) -> None:
    plain, whole = chain(ROOT, tokens, size), chain(ROOT, tokens, size, extras=extras)
    first = min(extras, default=len(plain))
    assert whole[:first] == plain[:first]
    assert not set(whole[first:]) & set(plain)
    known = data.draw(st.integers(0, len(whole)))
    assert chain(ROOT, tokens, size, whole[:known], extras) == whole
    for number, parent in enumerate([ROOT, *whole][: len(whole)]):
        own = extras.get(number, b"")
        assert whole[number] == block_hash(parent, tokens[number * size : (number + 1) * size], own)


def test_token_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        block_hash(ROOT, [2**31])
