"""Peers that die or freeze in the middle of a block, and one that is well beside them: the link goes on hearing it.
Where all peers shared a worker of UCX, three of 27 kills left the link deaf to everybody for good."""

from __future__ import annotations

from kvferry.kv_transfer.ucx import UcxLink
from tests.kv_transfer.link_processes import Recorder, child, send_blocks
from tests.kv_transfer.wedging import freezes, kills
from tests.waiting import wait_for


def test_kills_in_mid_ship_leave_the_others_heard():
    assert kills(rounds=2) == 0


def test_a_frozen_peer_leaves_the_others_heard():
    assert freezes(2) == 0


def test_no_two_peers_share_a_worker():
    recorder = Recorder()
    link = UcxLink("127.0.0.1")
    link.start(recorder)
    with child(send_blocks, link.address, 1, 8, {}) as (_, one), child(send_blocks, link.address, 1, 8, {}) as (_, two):
        for pipe in (one, two):
            assert pipe.recv() == "ready"
            pipe.send(("message", b"hello"))
        wait_for(lambda: len(recorder.messages) == 2)
        addresses = {link._connections.find(peer).worker.address for peer, _ in recorder.messages}
        assert len(addresses) == 2
    link.stop()
