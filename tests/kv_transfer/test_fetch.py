"""Fetches on loopback: the question, its answers, and that each comes to one end."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.kv_transfer.fetch import FetchClient, FetchServer, split
from kvferry.protocol.errors import Cancelled, DeadlineExceeded, NodeLost, NotFound
from kvferry.protocol.link_messages import Fetch, Supply
from kvferry.protocol.messages import DecodeTarget
from kvferry.protocol.wire import unpack
from tests.kv_transfer.fault_injection import Faults
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import EPOCH, FINGERPRINT, Process

HASHES = [bytes([number]) * 16 for number in range(1, 6)]


class Told:
    """Which fetches were said to bring nothing."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, Exception]] = []

    def unsupplied(self, fetch: int, error: Exception) -> None:
        self.ends.append((fetch, error))


class Ends:
    """A node that asks and one that is asked. `unsupplied`, `cancelled`: what the one that asks was told."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.network = LoopbackNetwork()
        self.ours, self.theirs = (Process(self.network, name, faults, 1, {}) for name in ("a:1", "g:1"))
        self.cancelled: list[tuple[Any, Exception]] = []
        self.wanted: list[tuple[Any, Fetch]] = []
        self.told = Told()
        self.asker = FetchClient(self.ours.dock, lambda key, error: self.cancelled.append((key, error)))
        self.giver = FetchServer(self.theirs.dock, lambda peer, fetch: self.wanted.append((peer, fetch)))
        for process in (self.ours, self.theirs):
            process.dock.start()

    @property
    def unsupplied(self) -> list[tuple[int, Exception]]:
        return self.told.ends

    def ask(self, to: str = "g:1", patience_s: float = 5.0) -> int:
        number = self.asker.ask(self.told, to, DecodeTarget("a", EPOCH, "a:1", FINGERPRINT), 2, HASHES, patience_s)
        self.network.run()
        return number

    def answer(self, number: int, transfer: int = 1, peer: Any = None) -> bool:
        """A grant is asked for, on the connection on which the fetch was."""
        if peer is None:
            peer = self.asker.transfers.find(number).peer  # type: ignore[union-attr]
        return self.asker.supplied((peer, transfer), Supply(number, 5))


def test_the_question_tells_what_is_missing_and_who_asks() -> None:
    ends = Ends()
    number = ends.ask()
    ((_, fetch),) = ends.wanted
    assert (fetch.transfer, fetch.first, split(fetch.hashes)) == (number, 2, HASHES)
    assert fetch.asker.node_id == "a"


def test_who_has_nothing_says_so_once() -> None:
    ends = Ends()
    number = ends.ask()
    for _ in range(2):
        ends.giver.deny(*ends.wanted[0], NotFound("gone"))
    ends.network.run()
    ((told, error),) = ends.unsupplied
    assert told == number
    assert isinstance(error, NotFound)
    assert not ends.asker.transfers


def test_one_supply_is_taken_and_a_second_one_is_not() -> None:
    ends = Ends()
    number = ends.ask()
    peer = ends.asker.transfers.find(number).peer  # type: ignore[union-attr]
    assert ends.answer(number)
    assert not ends.answer(number, 2)
    ends.giver.deny(*ends.wanted[0], NotFound("gone"))
    ends.network.run()
    assert not ends.unsupplied, "it was supplied"
    assert ends.asker.ended((peer, 1)) == number
    assert ends.asker.ended((peer, 1)) is None
    assert not ends.answer(number, 3, peer)
    assert not ends.asker.transfers


def test_another_peer_than_was_asked_supplies_nothing() -> None:
    ends = Ends()
    number = ends.ask()
    assert not ends.answer(number, peer="accepted#77")


def test_without_an_answer_it_is_late() -> None:
    ends = Ends()
    number = ends.ask(patience_s=2.0)
    ends.network.advance(1.9)
    assert not ends.unsupplied
    ends.network.advance(0.5)
    ((told, error),) = ends.unsupplied
    assert told == number
    assert isinstance(error, DeadlineExceeded)


def test_one_that_is_late_with_its_blocks_has_its_grant_cancelled_and_ends_with_that() -> None:
    ends = Ends()
    number = ends.ask(patience_s=2.0)
    peer = ends.asker.transfers.find(number).peer  # type: ignore[union-attr]
    assert ends.answer(number)
    ends.network.advance(2.5)
    assert ends.cancelled
    assert all(key == (peer, 1) and isinstance(error, DeadlineExceeded) for key, error in ends.cancelled)
    assert not ends.unsupplied, "the receiver tells of the end"
    assert ends.asker.ended((peer, 1)) == number


@pytest.mark.parametrize("supplied", [False, True])
def test_one_that_is_given_up_is_not_told_of(supplied: bool) -> None:
    ends = Ends()
    number = ends.ask()
    if supplied:
        assert ends.answer(number)
    ends.asker.abandon(number)
    ends.asker.abandon(number)
    ends.network.run()
    ends.network.advance(10.0)
    assert [type(error) for _, error in ends.cancelled] == [Cancelled] * supplied
    assert not ends.unsupplied
    assert not ends.asker.transfers


@pytest.mark.parametrize("supplied", [False, True])
def test_who_is_asked_dies(supplied: bool) -> None:
    ends = Ends()
    number = ends.ask()
    peer = ends.asker.transfers.find(number).peer  # type: ignore[union-attr]
    if supplied:
        assert ends.answer(number)
    ends.theirs.inner.kill()
    ends.network.run()
    ((told, error),) = ends.unsupplied
    assert told == number
    assert isinstance(error, NodeLost)
    assert ends.asker.ended((peer, 1)) is None, "the grant's end is no news"


def test_nobody_is_there() -> None:
    ends = Ends()
    ends.ask("nobody:1")
    ((_, error),) = ends.unsupplied
    assert isinstance(error, NodeLost)


def test_a_question_that_is_lost_is_late_and_one_that_comes_twice_is_asked_twice() -> None:
    lost = Ends(Faults(drop=lambda data: isinstance(unpack(data), Fetch)))
    lost.ask(patience_s=1.0)
    lost.network.advance(1.5)
    assert [type(error) for _, error in lost.unsupplied] == [DeadlineExceeded]
    twice = Ends(Faults(duplicate=lambda data: isinstance(unpack(data), Fetch)))
    number = twice.ask()
    assert [fetch.transfer for _, fetch in twice.wanted] == [number, number]
