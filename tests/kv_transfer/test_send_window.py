"""How ships share a link: on a slow network of a virtual clock, where what is sent first arrives first."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.kv_transfer.send_window import MAX_BLOCKS_IN_FLIGHT, SendWindow
from kvferry.kv_transfer.sender_ship import STALL_TIMEOUT_S
from kvferry.protocol.errors import Cancelled
from kvferry.protocol.link_messages import Commit
from kvferry.protocol.wire import unpack
from tests.kv_transfer.fault_injection import Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import DecodeSide, PrefillSide, delta

SMALL, LARGE = 4, 512
BLOCK_BYTES = 1 << 15
BLOCK_S = 0.015
"""Seconds a block takes: what the demo model's take at 24 MB/s."""
WINDOW = 4


class Slow:
    """A prefill and decode processes, each connection as slow as that."""

    def __init__(self, block_s: float = BLOCK_S, decodes: int = 1, faults: Faults | None = None):
        self.network = LoopbackNetwork(rate=BLOCK_BYTES / block_s)
        size: dict[str, Any] = {"blocks": 2 * LARGE, "block_bytes": BLOCK_BYTES}
        self.decodes = [DecodeSide(self.network, f"d:{n}", **size) for n in range(decodes)]
        self.prefill = PrefillSide(self.network, "p:1", faults, window=SendWindow(WINDOW * BLOCK_BYTES), **size)

    def begin(self, blocks: int, decode: int = 0) -> int:
        """Offer, wait for the grant, give all blocks to the link and commit."""
        transfer = self.prefill.offer(self.decodes[decode].target, blocks, deadline_s=1e6)
        self.until(transfer, "granted")
        self.prefill.ship(transfer, 0, blocks)
        self.prefill.sender.commit(transfer, delta())
        self.network.run()
        return transfer

    def until(self, transfer: int, what: str, limit_s: float = 1000.0) -> float:
        """Let time pass until the ship is so far; the seconds it took."""
        began = self.network.now
        while what not in self.prefill.log[transfer]:
            assert self.network.now - began < limit_s, f"never {what}"
            self.network.run()
            self.network.advance(BLOCK_S / 4)
        return self.network.now - began

    def took(self, blocks: int, decode: int = 0) -> float:
        began = self.network.now
        self.until(self.begin(blocks, decode), "done")
        return self.network.now - began

    def connections(self, decode: int = 0) -> int:
        return len(self.decodes[decode].inner._ends)


def alone(blocks: int) -> float:
    slow = Slow()
    slow.took(1)
    return slow.took(blocks)


@pytest.mark.parametrize("decode", [0, 1])
def test_a_small_ship_does_not_wait_behind_a_large_one(decode):
    """Nor does its offer, nor where it goes to another node."""
    slow = Slow(decodes=2)
    slow.took(1)
    slow.took(1, decode)
    large = slow.begin(LARGE)
    assert slow.took(SMALL, decode) < 2 * alone(SMALL) + 2 * WINDOW * BLOCK_S
    assert slow.prefill.log[large] == ["granted"]
    slow.until(large, "done")


def test_ships_that_run_together_end_together():
    slow = Slow()
    first, second = slow.begin(100), slow.begin(100)
    slow.until(first, "done")
    assert slow.until(second, "done") < 10 * BLOCK_S


def test_a_ship_that_moves_has_all_the_time_it_needs():
    slow = Slow(block_s=0.3)
    assert slow.took(LARGE) > 5 * STALL_TIMEOUT_S


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_a_large_ship_that_is_given_up_ends_at_once_and_no_other_with_it(by):
    slow = Slow(block_s=0.1)
    decode = slow.decodes[0]
    large, other = slow.begin(LARGE), slow.begin(100)
    key = next(iter(decode.log))
    if by == "prefill":
        slow.prefill.sender.abort(large, "the client disconnected")
    else:
        decode.receiver.cancel(key, Cancelled("the client disconnected"))
    assert slow.until(large, "quiet") < 5
    slow.until(other, "done")
    assert decode.log[key] == ["reserve", "failed", "quiet"]
    assert slow.connections() == 1


def test_a_ship_of_which_nothing_moves_fails_and_the_others_on_its_connection_go_on():
    """Its commits are lost, so it is never acknowledged."""
    lost = []

    def first_commit(data: bytes) -> bool:
        if isinstance(unpack(data), Commit) and (not lost or data in lost):
            lost.append(data)
            return True
        return False

    slow = Slow(faults=Faults(drop=first_commit))
    silent = slow.begin(SMALL)
    other = slow.begin(LARGE)
    slow.network.advance(STALL_TIMEOUT_S + 1)
    assert slow.prefill.log[silent][-2:] == ["failed", "quiet"]
    assert "not acknowledged" in str(slow.prefill.errors[silent])
    slow.until(other, "done")
    assert slow.connections() == 1


def test_a_ship_whose_sends_never_end_costs_the_others_no_turn_and_its_connection_in_the_end():
    slow = Slow(decodes=2)
    slow.took(1)
    post = slow.prefill.inner.send_block
    stuck = slow.prefill.sender._last_transfer + 1
    slow.prefill.inner.send_block = lambda peer, tag, buffer, done: (  # type: ignore[method-assign]
        None if tag >> 16 & 0xFFFF == stuck else post(peer, tag, buffer, done)
    )
    slow.begin(SMALL)
    assert slow.took(SMALL) < 2 * alone(SMALL)
    assert slow.prefill.log[stuck] == ["granted"]
    began = slow.network.now
    slow.until(stuck, "failed")
    slow.until(stuck, "quiet")
    assert slow.network.now - began < STALL_TIMEOUT_S + 12
    assert slow.connections() == 0
    assert slow.took(SMALL) < 100 * BLOCK_S


def test_the_window_is_shared_by_the_ships_that_have_something_to_send():
    window = SendWindow(8 << 20)
    assert window.share(1 << 20) == 8
    for ship in range(4):
        window.enter(ship)
    assert window.share(1 << 20) == 2
    assert window.share(1 << 30) == 1
    assert window.share(100) == MAX_BLOCKS_IN_FLIGHT // 4
    for ship in range(4):
        window.leave(ship)
    assert window.share(1 << 30) == 2
