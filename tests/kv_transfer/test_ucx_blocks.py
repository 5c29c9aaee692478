"""Finding the blocks that ended, with UCX played by a script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.kv_transfer.tags import block_tag
from kvferry.kv_transfer.ucx_blocks import SCAN, TURN, Post, UcxBlocks
from kvferry.protocol.errors import TransferFailed


class UCXError(Exception): ...


class Request:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.over, self.wrong, self.asked = False, False, 0

    @property
    def completed(self) -> bool:
        self.asked += 1
        return self.over

    def check_error(self) -> None:
        if self.wrong:
            raise UCXError("broken")


class Played:
    """Blocks on an endpoint whose requests end when the test says so."""

    def __init__(self) -> None:
        api = SimpleNamespace(UCXError=UCXError, UCXXTag=int)
        self.blocks = UcxBlocks("peer", SimpleNamespace(api=api, array=_array))  # type: ignore[arg-type]
        self.requests: dict[int, Request] = {}
        self.sends: dict[int, Request] = {}
        self.blocks.endpoint = SimpleNamespace(
            tag_send=lambda array, tag: self.sends.setdefault(tag, Request()),
            tag_recv=lambda array, tag: self.requests.setdefault(tag, Request()),
        )
        self.ended: list[tuple[int, Exception | None]] = []

    def post(self, transfer: int, count: int, *, send: bool = False) -> list[int]:
        tags = [block_tag(1, transfer, index) for index in range(count)]
        for tag in tags:
            self.blocks.post(Post(send, tag, bytearray(8), lambda error, tag=tag: self.ended.append((tag, error))))
        return tags

    def round(self) -> None:
        self.blocks.wake()
        self.look()

    def look(self) -> None:
        for done, error in self.blocks.reap():
            done(error)

    def asked(self) -> int:
        """Looks at requests since the last call."""
        asked = sum(request.asked for request in self.requests.values())
        for request in self.requests.values():
            request.asked = 0
        return asked


def _array(buffer: Any) -> Any:
    array = np.frombuffer(buffer, dtype=np.uint8)
    return SimpleNamespace(c_contiguous=array.flags.c_contiguous, readonly=not array.flags.writeable)


def test_a_round_costs_what_ended_and_a_look_at_each_transfer() -> None:
    played = Played()
    tags = [played.post(transfer, 1000) for transfer in range(3)]
    played.round()
    assert (played.asked(), played.ended) == (3, [])
    assert played.blocks.scanned
    for tag in tags[1][:5]:
        played.requests[tag].over = True
    played.round()
    assert played.asked() == 3 + 5
    assert played.ended == [(tag, None) for tag in tags[1][:5]]


def test_a_transfer_of_which_much_ended_leaves_others_their_turn() -> None:
    played = Played()
    many, few = played.post(1, 1000), played.post(2, 3)
    for tag in many + few:
        played.requests[tag].over = True
    played.round()
    assert len(played.ended) == SCAN
    assert [tag for tag, _ in played.ended[TURN : TURN + 3]] == few
    assert not played.blocks.scanned, "the link looks again before it sleeps"
    while not played.blocks.scanned:
        played.look()
    assert sorted(tag for tag, _ in played.ended) == sorted(many + few)


def test_what_ends_out_of_order_is_told_in_order_and_sends_wait_for_no_receive() -> None:
    played = Played()
    tags = played.post(1, 4)
    (sent,) = played.post(1, 1, send=True)
    assert sent == tags[0], "the same tag in both directions"
    for tag in (tags[2], tags[1]):
        played.requests[tag].over = True
    played.sends[sent].over = True
    played.round()
    assert played.ended == [(sent, None)]
    played.requests[tags[0]].over = True
    played.round()
    assert [tag for tag, _ in played.ended[1:]] == tags[:3]


def test_a_block_that_broke_is_told_of_and_what_is_abandoned_is_kept() -> None:
    played = Played()
    tags = played.post(1, 3)
    played.requests[tags[0]].over = played.requests[tags[0]].wrong = True
    played.round()
    ((tag, error),) = played.ended
    assert tag == tags[0]
    assert isinstance(error, TransferFailed)
    assert len(played.blocks.abandon()) == 2
    assert not played.blocks.ended()
    for tag in tags[1:]:
        played.requests[tag].over = True
    assert played.blocks.ended()
    played.round()
    assert len(played.ended) == 1


def test_a_buffer_that_ucx_would_treat_wrongly_is_refused() -> None:
    played = Played()
    with pytest.raises(ValueError, match="writable"):
        played.blocks.post(Post(False, block_tag(1, 1, 0), b"12345678", lambda error: None))
