"""Tags of different blocks and of the link itself never meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.tags import MAX_BLOCKS, MAX_NONCE, MAX_TRANSFER, WARM_TAG, block_tag

BLOCK = st.tuples(st.integers(1, MAX_NONCE), st.integers(0, MAX_TRANSFER), st.integers(0, MAX_BLOCKS - 1))


@given(BLOCK, BLOCK)
def test_a_tag_names_one_block(one, other):
    assert 0 <= block_tag(*one) < 1 << 64
    assert (block_tag(*one) == block_tag(*other)) == (one == other)


@given(BLOCK)
def test_the_links_own_tag_is_apart(block):
    assert WARM_TAG < 1 << 40 <= block_tag(*block)


def test_bounds_are_ours_to_keep():
    for bad in ((0, 1, 1), (MAX_NONCE + 1, 1, 1), (1, 1, MAX_BLOCKS)):
        with pytest.raises(AssertionError):
            block_tag(*bad)
