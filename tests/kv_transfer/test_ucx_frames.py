"""Framing: what was cut comes together in order, and no bytes get past the checks."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.link import MAX_MESSAGE_BYTES
from kv_transfer.tags import MAX_CHANNEL
from kv_transfer.ucx_frames import (
    ALIVE,
    FRAME_BYTES,
    GREETING,
    HEADER,
    HELLO,
    MAX_AHEAD,
    MESSAGE,
    WELCOME,
    FrameReader,
    FrameWriter,
    greeting,
)
from protocol.wire import WireError

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([WELCOME, MESSAGE, ALIVE]),
        st.integers(0, 3 * FRAME_BYTES + 1).map(lambda n: (bytes(range(251)) * 96)[:n]),
    ),
    max_size=6,
)


def frame(kind=MESSAGE, last=1, sequence=0, length=0, data=b""):
    return HEADER.pack(kind, last, sequence, length) + data


@given(MESSAGES, st.randoms(use_true_random=False))
def test_messages_come_whole_and_in_order_though_frames_overtake_each_other(messages, draw):
    writer, reader = FrameWriter(), FrameReader()
    frames = [f for kind, data in messages for f in writer.cut(kind, data)]
    order = sorted(range(len(frames)), key=lambda i: i + draw.randrange(8))
    assert list(chain.from_iterable(reader.take(frames[i]) for i in order)) == messages


@given(st.binary(min_size=HEADER.size, max_size=64))
def test_any_bytes_are_a_frame_or_a_wire_error(data):
    reader = FrameReader()
    try:
        messages = reader.take(data)
    except WireError:
        return
    assert all(kind in (WELCOME, MESSAGE, ALIVE) and len(payload) <= FRAME_BYTES for kind, payload in messages)


@pytest.mark.parametrize(
    "wrong",
    [
        frame(kind=HELLO),
        frame(kind=4),
        frame(last=2),
        frame(length=FRAME_BYTES + 1),
        frame(last=0, length=FRAME_BYTES - 1),
        frame(sequence=MAX_AHEAD),
        frame(sequence=(1 << 32) - 1),
    ],
)
def test_headers_out_of_bounds_are_refused(wrong):
    with pytest.raises(WireError):
        FrameReader().take(wrong)


def test_a_repeated_early_frame_is_refused():
    reader = FrameReader()
    assert reader.take(frame(sequence=3)) == []
    with pytest.raises(WireError, match="frame 3 where 0 was due"):
        reader.take(frame(sequence=3))


def test_pieces_beyond_the_largest_message_are_refused():
    writer, reader = FrameWriter(), FrameReader()
    *pieces, beyond, _ = writer.cut(MESSAGE, bytes(MAX_MESSAGE_BYTES + FRAME_BYTES))
    assert [message for piece in pieces for message in reader.take(piece)] == []
    with pytest.raises(WireError, match="more than"):
        reader.take(beyond)


def test_the_largest_message_passes():
    writer, reader = FrameWriter(), FrameReader()
    found = [message for piece in writer.cut(MESSAGE, bytes(MAX_MESSAGE_BYTES)) for message in reader.take(piece)]
    assert [(kind, len(data)) for kind, data in found] == [(MESSAGE, MAX_MESSAGE_BYTES)]


@pytest.mark.parametrize("data", [b"", b"\1", bytes(GREETING.size), bytes(GREETING.size + 1)])
def test_greetings_have_one_size_and_a_channel(data):
    with pytest.raises(WireError):
        greeting(data)
    assert greeting(GREETING.pack(1, MAX_CHANNEL)) == (1, MAX_CHANNEL)
