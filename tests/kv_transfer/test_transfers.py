"""The table of transfers: found by key, closed by peer, swept by deadline."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.transfers import SWEEP_S, Transfers
from protocol.errors import NodeLost, TransferFailed
from protocol.link_messages import CommitAck, Grant
from protocol.wire import WireError, pack


@dataclass
class Rider:
    key: int
    peer: str
    deadline: float = float("inf")


class Side:
    """A table on a link of its own; `log` keeps what it calls."""

    def __init__(self):
        self.network, self.log = LoopbackNetwork(), []
        link = self.network.link("a:1")
        link.start(self)
        self.table: Transfers[Rider] = Transfers(
            link,
            self.network.clock,
            forget=lambda peer: self.log.append(("forget", peer)),
            fail=lambda rider, error: self.log.append(("fail", rider.key, type(error).__name__)),
            quiet=lambda rider: self.log.append(("quiet", rider.key)),
            overdue=lambda rider: self.log.append(("overdue", rider.key)),
        )


@pytest.fixture
def side():
    return Side()


def test_a_drop_fails_all_of_the_peer_once_and_reports_those_left_quiet(side):
    riders = [Rider(1, "p"), Rider(2, "p"), Rider(3, "q")]
    for rider in riders:
        side.table.add(rider)
    side.table.drop("p", NodeLost("gone"))
    side.table.drop("p", NodeLost("gone again"))
    assert side.table.is_closing("p")
    assert side.log == [("forget", "p"), ("fail", 1, "NodeLost"), ("fail", 2, "NodeLost")]
    side.table.remove(riders[0])
    side.network.run()
    assert side.log[3:] == [("quiet", 2)]
    assert not side.table.is_closing("p")
    assert [side.table.find(key) for key in (1, 2, 3)] == [None, riders[1], riders[2]]


@pytest.mark.parametrize("error", [OSError("no route"), WireError("a frame of 9000 bytes")])
def test_an_error_that_is_not_the_requests_own_becomes_a_failed_transfer(side, error):
    side.table.add(Rider(1, "p"))
    side.table.drop("p", error)
    assert side.log[1] == ("fail", 1, TransferFailed.__name__)


def test_a_message_for_another_side_drops_its_peer(side):
    side.table.add(Rider(1, "p"))
    assert side.table.read("p", pack(CommitAck(1)), CommitAck) == CommitAck(1)
    assert side.table.read("p", pack(Grant(1, 0, 1, 1)), CommitAck) is None
    assert side.log == [("forget", "p"), ("fail", 1, "TransferFailed")]
    assert side.table.read("p", pack(CommitAck(1)), CommitAck) is None


def test_the_overdue_are_called_at_every_sweep_until_they_move_and_an_empty_table_is_not_swept(side):
    late, early = Rider(1, "p", deadline=1.0), Rider(2, "p", deadline=9.0)
    side.table.add(late)
    side.table.add(early)
    side.network.advance(1.0 + 2.5 * SWEEP_S)
    assert side.log == [("overdue", 1)] * 2
    late.deadline = 5.0
    side.network.advance(2.0)
    assert len(side.log) == 2
    for rider in (late, early):
        side.table.remove(rider)
    side.network.advance(10.0)
    assert len(side.log) == 2
    assert not side.network._timers
    assert len(side.table) == 0


def test_an_error_about_one_that_is_overdue_does_not_end_the_watch(side):
    """The link logs what a timer raises and goes on."""
    side.table.add(Rider(1, "p", deadline=1.0))
    side.table.add(Rider(2, "p", deadline=2.0))
    overdue = side.table._overdue

    def fails_for_the_first(rider: Rider) -> None:
        if rider.key == 1:
            side.table.remove(rider)
            raise RuntimeError("boom")
        overdue(rider)

    side.table._overdue = fails_for_the_first
    with pytest.raises(RuntimeError):
        side.network.advance(1.0 + 2 * SWEEP_S)
    side.network.advance(1.0 + 2 * SWEEP_S)
    assert ("overdue", 2) in side.log
