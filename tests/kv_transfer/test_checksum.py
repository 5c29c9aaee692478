"""Sampling and the two ways to take checksums."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from kvferry.kv_transfer.checksum import MAX_CHECKSUM, InlineChecksums, ThreadedChecksums, checksum, digests, is_sampled


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_sampled_share_is_near_the_asked_one_and_exact_at_the_ends(share):
    chosen = sum(is_sampled(transfer, index, share) for transfer in range(40) for index in range(100))
    assert chosen == pytest.approx(4000 * share, abs=0 if share in (0.0, 1.0) else 150)


def test_a_larger_share_contains_the_smaller():
    for index in range(500):
        assert is_sampled(3, index, 0.6) or not is_sampled(3, index, 0.3)


def threaded(submit):
    return ThreadedChecksums(submit, None, digests)


def test_inline_checksums_are_there_at_once():
    block, values = np.arange(5000, dtype=np.uint8), []
    assert InlineChecksums().take(block, values.append) == checksum(block.tobytes())
    assert values == []


def test_those_of_a_thread_come_through_submit():
    submitted: queue.SimpleQueue = queue.SimpleQueue()
    block, values = np.arange(5000, dtype=np.uint8), []
    assert threaded(submitted.put).take(block, values.append) is None
    call = submitted.get(timeout=5)
    assert values == []
    call()
    assert values == [checksum(block.tobytes())]


def test_any_changed_bit_changes_the_checksum_and_none_is_taken_for_unverified():
    block = np.arange(4096, dtype=np.uint8)
    seen = {checksum(block)}
    for bit in range(0, 4096 * 8, 97):
        block[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(block))
        block[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + len(range(0, 4096 * 8, 97))
    assert 0 <= min(seen) <= max(seen) <= MAX_CHECKSUM


def test_a_buffer_that_has_no_checksum_holds_up_none_that_come_later():
    submitted: queue.SimpleQueue = queue.SimpleQueue()
    checksums, values = threaded(submitted.put), []
    checksums.take(None, values.append)
    with pytest.raises(queue.Empty):
        submitted.get(timeout=0.2)
    for _ in range(2):
        checksums.take(b"block", values.append)
    while len(values) < 2:
        submitted.get(timeout=5)()
    assert values == [checksum(b"block")] * 2
