"""Every class of message, damaged in every way: readers raise their one error, or have a value; nothing else ends."""

from __future__ import annotations

import os
import random
import time
import tracemalloc

import msgpack
import pytest

from kvferry.protocol.wire import MAX_ITEMS, FrameReader, WireError, unpack
from tests.mutations import made, mutated
from tests.protocol.test_wire import MESSAGES

SEED = os.environ.get("KVFERRY_TEST_SEED", "1")
EACH = int(os.environ.get("KVFERRY_TEST_MUTATIONS", "150"))


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_damaged_message_is_read_or_refused(cls: type) -> None:
    rng = random.Random(f"{SEED} {cls.__name__}")
    refused = 0
    for _ in range(EACH):
        data = mutated(made(cls, rng), rng)
        try:
            unpack(data)
        except WireError:
            refused += 1
        reader = FrameReader()
        try:
            for at in range(0, len(data), 7):
                list(reader.feed(data[at : at + 7]))
        except WireError:
            pass
    assert 0 < refused < EACH


def test_few_bytes_do_not_become_much_memory() -> None:
    began = time.monotonic()
    tracemalloc.start()
    try:
        for data in (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc9\xff\xff\xff\xff\x18",
            b"\xc6\xff\xff\xff\xff",
        ):
            with pytest.raises(WireError):
                unpack(data + b"\xc0" * 1000)
        with pytest.raises(WireError):
            unpack(msgpack.packb([None] * (MAX_ITEMS + 1)))
        assert tracemalloc.get_traced_memory()[1] < 128 * 2**20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 20
