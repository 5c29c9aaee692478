"""What is not answered is said again, and said twice it does no harm: no single message of a ship matters."""

from __future__ import annotations

import pytest

from kvferry.kv_transfer import retransmission
from kvferry.kv_transfer.receiver_grant import COMMIT_TIMEOUT_S
from kvferry.kv_transfer.retransmission import REMEMBERED, REPEAT_S, SendingProcess
from kvferry.protocol.errors import GrantRefused
from kvferry.protocol.link_messages import Abort, Commit, CommitAck, Grant, GrantRequest, Refusal
from kvferry.protocol.wire import unpack
from tests.kv_transfer.fault_injection import Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import DecodeSide, PrefillSide, delta


class Pair:
    """A prefill and a decode side between which the first messages of these classes are lost."""

    def __init__(self, *lost: type, decode_blocks: int = 48) -> None:
        self.network = LoopbackNetwork()
        self.lost, self.sent = list(lost), []
        faults = Faults(drop=self.drop)
        self.decode = DecodeSide(self.network, "d:1", faults, blocks=decode_blocks)
        self.prefill = PrefillSide(self.network, "p:1", faults)

    def drop(self, data: bytes) -> bool:
        kind = type(unpack(data))
        self.sent.append(kind)
        if kind in self.lost:
            self.lost.remove(kind)
            return True
        return False

    def begin(self, blocks: int = 3) -> int:
        transfer = self.prefill.offer(self.decode.target, blocks, deadline_s=600.0)
        self.network.run()
        return transfer

    def finish(self, transfer: int) -> None:
        self.prefill.ship(transfer, 0, len(self.prefill.blocks[transfer]))
        self.prefill.sender.commit(transfer, delta())
        self.network.run()

    def check_nothing_left(self) -> None:
        assert not self.prefill.sender.transfers
        assert not self.decode.receiver.transfers
        assert not self.prefill.pool.ledger.num_held
        for key, log in self.decode.log.items():
            if log[-1] == "ready":
                self.decode.finish(key)
        assert not self.decode.pool.ledger.num_held


@pytest.mark.parametrize("lost", [GrantRequest, Grant])
def test_an_offer_or_its_grant_that_is_lost_costs_a_moment(lost):
    pair = Pair(lost)
    transfer = pair.begin()
    assert pair.prefill.log[transfer] == []
    pair.network.advance(REPEAT_S + 0.5)
    assert pair.prefill.log[transfer] == ["granted"]
    pair.finish(transfer)
    assert pair.prefill.log[transfer] == ["granted", "done", "quiet"]
    assert [log[:1] for log in pair.decode.log.values()] == [["reserve"]]
    pair.check_nothing_left()


@pytest.mark.parametrize("lost", [Commit, CommitAck])
def test_a_commit_or_its_acknowledgement_that_is_lost_costs_a_moment(lost):
    pair = Pair(lost)
    transfer = pair.begin()
    pair.finish(transfer)
    assert "done" not in pair.prefill.log[transfer]
    pair.network.advance(REPEAT_S + 0.5)
    assert pair.prefill.log[transfer] == ["granted", "done", "quiet"]
    assert [log.count("ready") for log in pair.decode.log.values()] == [1]
    pair.check_nothing_left()


def test_a_refusal_that_is_lost_is_given_again():
    pair = Pair(Refusal, decode_blocks=2)
    transfer = pair.begin()
    assert pair.prefill.log[transfer] == []
    pair.network.advance(REPEAT_S + 0.5)
    assert pair.prefill.log[transfer] == ["failed", "quiet"]
    assert isinstance(pair.prefill.errors[transfer], GrantRefused)
    pair.check_nothing_left()


def test_an_offer_given_up_that_never_came_is_forgotten_by_both():
    pair = Pair(GrantRequest)
    transfer = pair.begin()
    pair.prefill.sender.abort(transfer, "test")
    pair.network.run()
    pair.network.advance(1.0)
    assert pair.prefill.log[transfer] == ["failed", "quiet"]
    pair.check_nothing_left()
    pair.decode.receiver.take(next(iter(pair.decode.inner._ends)), Abort(transfer, "again"))
    pair.network.run()
    pair.check_nothing_left()


def test_a_grant_whose_abort_is_lost_does_not_wait_for_its_commit_till_the_end():
    pair = Pair(Abort)
    transfer = pair.begin()
    pair.prefill.sender.abort(transfer, "test")
    pair.network.run()
    pair.network.advance(COMMIT_TIMEOUT_S + 1.0)
    assert [log[-2:] for log in pair.decode.log.values()] == [["failed", "quiet"]]
    pair.check_nothing_left()


def test_what_waits_for_its_answer_is_said_less_and_less_often():
    pair = Pair()
    pair.decode.auto = False
    pair.begin()
    pair.network.advance(29.0)
    assert pair.sent.count(GrantRequest) == 4, "after 0, 2, 6 and 14 s"
    pair.decode.answer(pair.decode.asked[0])
    pair.network.advance(2.0)
    assert pair.sent.count(GrantRequest) == 4


def test_a_transfer_is_new_once_while_it_is_remembered():
    sender = SendingProcess(1)
    assert [sender.is_new(t) for t in (1, 2, 1)] == [True, True, False]
    assert all(sender.is_new(t) for t in range(3, 3 + REMEMBERED))
    assert sender.is_new(1)


def test_an_open_offer_is_known_however_many_came_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """More were open than are remembered when they have ended: the repeated one was reserved once more."""
    monkeypatch.setattr(retransmission, "REMEMBERED", 2)
    network = LoopbackNetwork()
    decode, prefill = DecodeSide(network, "d:1", blocks=48), PrefillSide(network, "p:1", blocks=64)
    decode.auto = False
    for _ in range(4):
        prefill.offer(decode.target, 1, deadline_s=600.0)
    network.run()
    assert len(decode.asked) == 4
    network.advance(2.6)
    assert len(decode.asked) == 4
