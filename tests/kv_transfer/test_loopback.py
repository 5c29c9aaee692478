"""The loopback network: order, time, loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.protocol.errors import NodeLost
from tests.kv_transfer.link_processes import Recorder
from tests.kv_transfer.loopback import LoopbackNetwork


def pair():
    network = LoopbackNetwork()
    a, b = network.link("a:1"), network.link("b:1")
    left, right = Recorder(), Recorder()
    a.start(left)
    b.start(right)
    return network, a, b, left, right


def test_nothing_happens_until_a_step_and_control_keeps_its_order():
    network, a, _, _, right = pair()
    peer = a.connect("b:1")
    for i in range(3):
        a.send(peer, b"%d" % i)
    assert right.messages == []
    network.run()
    assert [data for _, data in right.messages] == [b"0", b"1", b"2"]


def test_a_block_meets_its_receive_whichever_comes_first_and_a_short_one_writes_only_its_bytes():
    network, a, b, _, right = pair()
    peer = a.connect("b:1")
    a.send(peer, b"hi")
    network.run()
    back = right.messages[0][0]
    out, into, done = np.full(4, 9, dtype=np.uint8), np.zeros((2, 4), dtype=np.uint8), []
    a.send_block(peer, 1, out, lambda e: done.append(("sent", e)))
    b.receive_block(back, 1, into[0], lambda e: done.append(("landed", e)))
    b.receive_block(back, 2, into[1], lambda e: done.append(("landed", e)))
    a.send_block(peer, 2, b"\1", lambda e: done.append(("sent", e)))
    network.run()
    assert sorted(done) == [("landed", None), ("landed", None), ("sent", None), ("sent", None)]
    assert into.tolist() == [[9, 9, 9, 9], [1, 0, 0, 0]]


def test_a_killed_peer_is_a_loss_and_disconnect_reports_errors_before_quiet():
    network, a, b, _, right = pair()
    a.send(a.connect("b:1"), b"hi")
    network.run()
    peer, order = right.messages[0][0], list[Any]()
    b.receive_block(peer, 1, np.zeros(4, dtype=np.uint8), lambda e: order.append(type(e)))
    a.kill()
    network.run()
    assert [p for p, _ in right.lost] == [peer]
    b.disconnect(peer, lambda: order.append("quiet"))
    network.run()
    assert order == [NodeLost, "quiet"]


def test_an_unknown_address_is_a_lost_peer():
    network, a, _, left, _ = pair()
    peer = a.connect("nobody:1")
    network.run()
    assert [p for p, _ in left.lost] == [peer]


def test_timers_run_when_the_clock_reaches_them():
    network, a, _, _, _ = pair()
    rang = []
    a.call_later(2.0, lambda: rang.append(network.now))
    a.call_later(1.0, lambda: rang.append(network.now))
    network.advance(1.5)
    assert rang == [1.0]
    network.advance(1.0)
    assert rang == [1.0, 2.0]
    assert network.now == 2.5
