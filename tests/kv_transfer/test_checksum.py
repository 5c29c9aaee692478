"""Sampling and the two ways to take checksums."""

from __future__ import annotations

import queue
import zlib

import numpy as np
import pytest

from kv_transfer.checksum import InlineChecksums, ThreadedChecksums, is_sampled


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_sampled_share_is_near_the_asked_one_and_exact_at_the_ends(share):
    chosen = sum(is_sampled(transfer, index, share) for transfer in range(40) for index in range(100))
    assert chosen == pytest.approx(4000 * share, abs=0 if share in (0.0, 1.0) else 150)


def test_a_larger_share_contains_the_smaller():
    for index in range(500):
        assert is_sampled(3, index, 0.6) or not is_sampled(3, index, 0.3)


@pytest.mark.parametrize("kind", [InlineChecksums, ThreadedChecksums])
def test_checksums_come_through_submit(kind):
    submitted: queue.SimpleQueue = queue.SimpleQueue()
    block, values = np.arange(5000, dtype=np.uint8), []
    kind(submitted.put).take(block, values.append)
    call = submitted.get(timeout=5)
    assert values == []
    call()
    assert values == [zlib.crc32(block.tobytes())]
