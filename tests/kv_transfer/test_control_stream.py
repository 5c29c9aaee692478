"""Frames over a socket: whole, in order, sealed; and never a wait."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.control_stream import (
    ALIVE,
    CHALLENGE,
    HEADER,
    HELLO,
    MAX_HANDSHAKE_BYTES,
    MAX_UNSENT_BYTES,
    MESSAGE,
    Stream,
)
from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES
from kvferry.protocol.errors import NodeLost
from kvferry.protocol.wire import WireError

ONE, TWO = b"1" * 32, b"2" * 32


class Ends:
    """Two connected streams, sealed."""

    def __init__(self, sealed: bool = True):
        left, right = socket.socketpair()
        self.left, self.right = Stream(left), Stream(right)
        if sealed:
            self.left.seal(ONE, TWO)
            self.right.seal(TWO, ONE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.left.close()
        self.right.close()

    def pass_on(self) -> list[tuple[int, bytes]]:
        """Everything that the left end sent."""
        heard = []
        while True:
            self.left.flush()
            self.right.fill()
            while (frame := self.right.next()) is not None:
                heard.append(frame)
            if not self.left.unsent:
                return heard


@given(st.lists(st.tuples(st.sampled_from((MESSAGE, ALIVE)), st.binary(max_size=300_000)), max_size=8))
def test_frames_arrive_whole_and_in_order(frames):
    frames = [(kind, b"" if kind == ALIVE else data) for kind, data in frames]
    with Ends() as ends:
        for kind, data in frames:
            ends.left.send(kind, data)
        heard = ends.pass_on()
        ends.right.fill()
        while (frame := ends.right.next()) is not None:
            heard.append(frame)
        assert heard == frames


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_wire_errors(data):
    for sealed in (False, True):
        with Ends(sealed) as ends:
            ends.left._socket.sendall(data)
            ends.right.fill()
            try:
                while ends.right.next() is not None:
                    pass
            except WireError:
                pass


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_sealed_frame_that_was_changed_is_refused(payload, data):
    with Ends() as ends:
        header = HEADER.pack(MESSAGE, len(payload))
        sealed = bytearray(header + payload + ends.left._outward.next(header, payload))
        place = data.draw(st.integers(HEADER.size, len(sealed) - 1))
        sealed[place] ^= data.draw(st.integers(1, 255))
        ends.left._socket.sendall(sealed)
        ends.right.fill()
        with pytest.raises(WireError, match="authentication code"):
            ends.right.next()


def test_a_frame_left_out_or_repeated_or_sent_back_is_refused():
    def sealed(stream):
        header = HEADER.pack(MESSAGE, 1)
        return header + b"a" + stream._outward.next(header, b"a")

    def refused(ends):
        ends.right.fill()
        with pytest.raises(WireError, match="authentication code"):
            list(iter(ends.right.next, None))

    with Ends() as ends:
        sealed(ends.left)
        ends.left._socket.sendall(sealed(ends.left))
        refused(ends)
    with Ends() as ends:
        ends.left._socket.sendall(sealed(ends.left) * 2)
        refused(ends)
    with Ends() as ends:
        ends.left._socket.sendall(sealed(ends.right))
        refused(ends)


@pytest.mark.parametrize(
    ("sealed", "kind", "length"),
    [
        (False, MESSAGE, 1),
        (False, ALIVE, 0),
        (False, HELLO, MAX_HANDSHAKE_BYTES + 1),
        (False, 17, 0),
        (True, CHALLENGE, 41),
        (True, MESSAGE, MAX_MESSAGE_BYTES + 1),
        (True, ALIVE, 1),
    ],
)
def test_headers_out_of_turn_or_bounds_are_refused_before_their_payload(sealed, kind, length):
    with Ends(sealed) as ends:
        ends.left._socket.sendall(HEADER.pack(kind, length))
        ends.right.fill()
        with pytest.raises(WireError):
            ends.right.next()


def test_a_peer_that_does_not_read_is_lost_before_its_messages_fill_the_memory():
    with Ends() as ends:
        for _ in range(MAX_UNSENT_BYTES // MAX_MESSAGE_BYTES - 1):
            ends.left.send(MESSAGE, bytes(MAX_MESSAGE_BYTES))
        with pytest.raises(NodeLost, match="does not read"):
            ends.left.send(MESSAGE, bytes(2 * MAX_MESSAGE_BYTES))


def test_the_end_is_told_after_what_came_before_it():
    with Ends() as ends:
        ends.left.send(MESSAGE, b"goodbye")
        ends.left.close()
        assert ends.right.fill() in (True, False)
        assert ends.right.next() == (MESSAGE, b"goodbye")
        assert ends.right.fill() is False
        with pytest.raises(NodeLost):
            ends.right.send(MESSAGE, b"x")
