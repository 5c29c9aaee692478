"""The faulty link breaks what it is told to, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.protocol.errors import NodeLost
from tests.kv_transfer.fault_injection import LATE_BYTE, Faults, FaultyLink
from tests.kv_transfer.link_processes import Recorder
from tests.kv_transfer.loopback import LoopbackNetwork


def ends(faults: Faults):
    """(network, near link, its handler, far faulty link, its handler, peer near → far, peer far → near)"""
    network = LoopbackNetwork()
    near, far = network.link("near:1"), FaultyLink(network.link("far:1"), faults)
    left, right = Recorder(), Recorder()
    near.start(left)
    far.start(right)
    peer = near.connect("far:1")
    near.send(peer, b"hi")
    network.run()
    return network, near, left, far, right, peer, right.messages[0][0]


def test_messages_are_dropped_doubled_and_delayed_as_chosen():
    faults = Faults(
        drop=lambda data: data == b"a",
        duplicate=lambda data: data == b"b",
        delay_s=lambda data: 1.0 if data == b"c" else 0.0,
    )
    network, _, left, far, _, _, back = ends(faults)
    for data in (b"a", b"b", b"c", b"d"):
        far.send(back, data)
    network.run()
    assert [data for _, data in left.messages] == [b"b", b"b", b"d"]
    network.advance(1.0)
    assert left.messages[-1][1] == b"c"


def test_a_chosen_block_arrives_corrupted():
    network, near, _, far, _, peer, back = ends(Faults(corrupt=lambda tag: tag == 2))
    source, target = np.full((2, 4), 8, dtype=np.uint8), np.zeros((2, 4), dtype=np.uint8)
    for tag in (1, 2):
        far.receive_block(back, tag, target[tag - 1], lambda error: None)
        near.send_block(peer, tag, source[tag - 1], lambda error: None)
    network.run()
    assert target.tolist() == [[8, 8, 8, 8], [9, 8, 8, 8]]


def test_abandoned_receives_are_written_to_until_quiet():
    network, _, _, far, _, _, back = ends(Faults())
    target, seen = np.zeros(4, dtype=np.uint8), list[Any]()
    far.receive_block(back, 1, target, lambda error: seen.append((type(error), target.tolist())))
    far.disconnect(back, lambda: seen.append(("quiet", target.tolist())))
    network.run()
    assert seen == [(NodeLost, [0] * 4), ("quiet", [LATE_BYTE] * 4)]


def test_sever_is_a_loss_for_the_handler():
    network, _, _, far, right, _, back = ends(Faults())
    far.sever(back, NodeLost("cut"))
    network.run()
    assert [(peer, str(error)) for peer, error in right.lost] == [(back, "cut")]
