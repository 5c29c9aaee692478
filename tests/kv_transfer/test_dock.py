"""The dock: messages by class, one sweep over all deadlines, a connection closed under all endpoints at once; and a
node that mounts both a sender and a receiver."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.kv_transfer.dock import SWEEP_S, Dock
from kvferry.kv_transfer.transfers import Transfers
from kvferry.protocol.errors import NodeLost, TransferFailed
from kvferry.protocol.link_messages import Abort, CommitAck, Grant
from kvferry.protocol.wire import WireError, pack
from tests.kv_transfer.loopback import LoopbackNetwork
from tests.kv_transfer.ship_kit import BothSides, Pool, delta
from tests.later_checksums import LaterChecksums


@dataclass
class Rider:
    key: int
    peer: str
    deadline: float = float("inf")


class Lane:
    """An endpoint that writes down what it is told."""

    def __init__(self, dock: Dock, log: list, *takes: type):
        self.takes, self._log = takes, log
        self.transfers: Transfers[Rider] = Transfers(dock.watch)
        dock.mount(self)

    def add(self, *riders: Rider) -> None:
        for rider in riders:
            self.transfers.add(rider)

    def take(self, peer, message):
        self._log.append(("take", peer, message))

    def forget(self, peer):
        self._log.append(("forget", peer))

    def fail(self, rider, error):
        self._log.append(("fail", rider.key, type(error).__name__))

    def closed(self, rider):
        self._log.append(("closed", rider.key))

    def overdue(self, rider):
        self._log.append(("overdue", rider.key))


class Node:
    """A dock with two lanes; `log` keeps what both are told."""

    def __init__(self):
        self.network, self.log = LoopbackNetwork(), []
        link = self.network.link("a:1")
        self.dock = Dock(link, Pool(1), checksums=LaterChecksums(link.submit), clock=self.network.clock)
        self.one = Lane(self.dock, self.log, CommitAck)
        self.two = Lane(self.dock, self.log, Abort)
        self.dock.start()


@pytest.fixture
def node():
    return Node()


def test_a_drop_fails_what_all_endpoints_have_of_the_peer_once_and_tells_those_left_when_it_is_closed(node):
    riders = [Rider(1, "p"), Rider(2, "p"), Rider(3, "q")]
    node.one.add(riders[0], riders[2])
    node.two.add(riders[1])
    node.dock.drop("p", NodeLost("gone"))
    node.dock.drop("p", NodeLost("gone again"))
    assert node.dock.is_closing("p")
    assert node.log == [("forget", "p"), ("fail", 1, "NodeLost"), ("forget", "p"), ("fail", 2, "NodeLost")]
    node.one.transfers.remove(riders[0])
    node.network.run()
    assert node.log[4:] == [("closed", 2)]
    assert not node.dock.is_closing("p")


@pytest.mark.parametrize("error", [OSError("no route"), WireError("a frame of 9000 bytes")])
def test_an_error_that_is_not_the_requests_own_becomes_a_failed_transfer(node, error):
    node.one.add(Rider(1, "p"))
    node.dock.peer_lost("p", error)
    assert node.log[1] == ("fail", 1, TransferFailed.__name__)


def test_messages_go_to_the_endpoint_of_their_class_and_others_cost_their_peer_its_connection(node):
    node.one.add(Rider(1, "p"))
    node.dock.message("p", pack(CommitAck(1)))
    node.dock.message("p", pack(Abort(1, "why")))
    assert node.log == [("take", "p", CommitAck(1)), ("take", "p", Abort(1, "why"))]
    node.log.clear()
    node.dock.message("p", pack(Grant(1, 0, 1, 1)))
    assert node.log == [("forget", "p"), ("fail", 1, "TransferFailed"), ("forget", "p")]
    node.dock.message("p", pack(CommitAck(1)))
    assert len(node.log) == 3, "a message of a connection that is being closed"


def test_two_endpoints_cannot_take_the_same_message(node):
    with pytest.raises(AssertionError, match="CommitAck"):
        Lane(node.dock, [], CommitAck, Grant)


def test_the_overdue_are_called_at_every_sweep_until_they_move_and_empty_tables_are_not_swept(node):
    late, early = Rider(1, "p", deadline=1.0), Rider(2, "p", deadline=9.0)
    node.one.add(late)
    node.two.add(early)
    node.network.advance(1.0 + 2.5 * SWEEP_S)
    assert node.log == [("overdue", 1)] * 2
    late.deadline = 5.0
    node.network.advance(2.0)
    assert len(node.log) == 2
    node.one.transfers.remove(late)
    node.two.transfers.remove(early)
    node.network.advance(10.0)
    assert len(node.log) == 2
    assert not node.network._timers


def test_an_error_about_one_that_is_overdue_does_not_end_the_watch(node):
    """The link logs what a timer raises and goes on."""
    node.one.add(Rider(1, "p", deadline=1.0))
    node.two.add(Rider(2, "p", deadline=2.0))

    def fails(rider: Rider) -> None:
        node.one.transfers.remove(rider)
        raise RuntimeError("boom")

    node.one.overdue = fails
    with pytest.raises(RuntimeError):
        node.network.advance(1.0 + 2 * SWEEP_S)
    node.network.advance(1.0 + 2 * SWEEP_S)
    assert ("overdue", 2) in node.log


def test_nodes_that_mount_both_sides_ship_to_each_other_at_once():
    network = LoopbackNetwork()
    a, b = BothSides(network, "a:1"), BothSides(network, "b:1")
    ships = [(a, b, a.prefill.offer(b.decode.target, 3)), (b, a, b.prefill.offer(a.decode.target, 2))]
    network.run()
    for source, _, transfer in ships:
        source.prefill.ship(transfer, 0, 3)
        source.prefill.sender.commit(transfer, delta())
    network.run()
    for source, target, transfer in ships:
        assert source.prefill.log[transfer] == ["granted", "done", "quiet"]
        (key,) = target.decode.log
        assert target.decode.log[key] == ["reserve", "ready"]
        target.decode.finish(key)
    for node in (a, b):
        node.check_nothing_left()


def test_a_node_that_dies_ends_what_others_sent_to_it_and_what_it_sent_to_them():
    network = LoopbackNetwork()
    a, b, c = (BothSides(network, f"{name}:1") for name in "abc")
    out, back = a.prefill.offer(b.decode.target, 3), b.prefill.offer(a.decode.target, 2)
    other = a.prefill.offer(c.decode.target, 2)
    network.run()
    a.prefill.ship(out, 0, 2)
    b.prefill.ship(back, 0, 1)
    b.process.inner.kill()
    network.run()
    assert a.prefill.log[out] == ["granted", "failed", "quiet"]
    (key,) = a.decode.log
    assert key[1] == back
    assert a.decode.log[key] == ["reserve", "failed", "quiet"]
    a.prefill.ship(other, 0, 2)
    a.prefill.sender.commit(other, delta())
    network.run()
    assert a.prefill.log[other] == ["granted", "done", "quiet"]
    c.decode.finish(next(iter(c.decode.log)))
    for node in (a, c):
        node.check_nothing_left()
