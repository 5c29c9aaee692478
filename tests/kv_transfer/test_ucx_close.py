"""Connections that are closed while blocks are on the way: the link thread comes back, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from kvferry.kv_transfer.tags import block_tag
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.kv_transfer.ucx_abandoned_connections import MAX_ABANDONED, AbandonedConnections, MemoryNotQuiet
from kvferry.kv_transfer.ucx_library import UcxLibrary, load
from kvferry.kv_transfer.ucx_loop import UcxLoop
from kvferry.kv_transfer.ucx_worker import RELEASE_S, UcxWorker
from tests.kv_transfer.link_processes import Recorder, child, no_thread_left
from tests.waiting import wait_for

PAUSES_S = (0.0, 0.0, 1e-4, 3e-4, 1e-3, 2e-3)
"""Between a peer's first word and the end of its connection: the block that warms it up is under way for so long."""


class Dropping(Recorder):
    """Drops anyone who says something, a little later."""

    link: UcxLink

    def message(self, peer, data):
        super().message(peer, data)
        pause = PAUSES_S[len(self.messages) % len(PAUSES_S)]
        if pause:
            self.link.call_later(pause, lambda: self.link.disconnect(peer, lambda: None))
        else:
            self.link.disconnect(peer, lambda: None)

    def peer_lost(self, peer, error):
        self.link.disconnect(peer, lambda: self.lost.append((peer, error)))


@pytest.fixture
def pair():
    """Two links in this process."""
    ends = Dropping(), Dropping()
    with no_thread_left():
        for end in ends:
            end.link = UcxLink("127.0.0.1")
            end.link.start(end)
        yield ends
        for end in ends:
            end.link.stop()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("count", "size"), [(0, 0), (64, 6000), (8, 368_640)])
def test_a_connection_dropped_with_blocks_on_the_way_hangs_no_thread_and_leaves_no_descriptor(pair, count, size):
    """With the block that warms it up alone, and with blocks that nobody receives. In one of ten cases the thread never
    came back: it waited for the rest of what its peer did not send any more."""
    far, near = pair
    block = np.ones(size, dtype=np.uint8)

    def dial() -> None:
        peer = near.link.connect(far.link.address)
        near.link.send(peer, b"hello")
        for index in range(count):
            near.link.send_block(peer, block_tag(1, 1, index), block, lambda error: None)

    for number in range(1, 41):
        if number == 5:
            before = descriptors()
        near.link.submit(dial)
        wait_for(lambda number=number: len(near.lost) == number, 5)
    wait_for(lambda: descriptors() <= before, 5, descriptors)


def receiving(pipe) -> None:
    """Child: receive blocks of this size from anyone who says a word, as fast as they come."""
    link = UcxLink("127.0.0.1")
    buffer = np.zeros(368_640, dtype=np.uint8)

    def post(peer, index: int) -> None:
        tag = block_tag(1, 1, index)
        link.receive_block(peer, tag, buffer, lambda error: None if error else post(peer, index))

    link.start(Recorder(lambda peer, data: [post(peer, index) for index in range(64)]))
    pipe.send(link.address)
    pipe.poll(60)


def test_a_connection_to_a_frozen_peer_whose_queue_is_full_is_closed_at_once(pair):
    _, near = pair
    block = np.ones(368_640, dtype=np.uint8)
    peers: list[Any] = []
    taken: list[float] = []
    sent = [0]

    def send(index: int) -> None:
        def again(error) -> None:
            sent[0] += 1
            if error is None:
                send(index)

        near.link.send_block(peers[-1], block_tag(1, 1, index), block, again)

    def flood(address: str) -> None:
        peers.append(near.link.connect(address))
        near.link.send(peers[-1], b"hello")
        for index in range(64):
            send(index)

    def drop() -> None:
        began = time.monotonic()
        near.link.disconnect(peers[-1], lambda: None)
        taken.append(time.monotonic() - began)

    with child(receiving) as (process, pipe):
        address = pipe.recv()
        for number in range(1, 4):
            sent[0] = 0
            near.link.submit(lambda: flood(address))
            wait_for(lambda: sent[0] > 100)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.1)
            near.link.submit(drop)
            wait_for(lambda number=number: len(taken) == number, 5)
            os.kill(process.pid, signal.SIGCONT)
    assert max(taken) < 2.0


class Stuck:
    """An endpoint and a worker of UCX that never end anything; `busy`: that always find something to do."""

    descriptor = 0

    def __init__(self, busy: bool = False, left_over: int = 0):
        self.busy, self.left_over = busy, left_over
        self.completed = False
        self.close_blocking = lambda: None
        self.cancel_inflight_requests = lambda: 0

    def progress_once(self) -> bool:
        return self.busy

    def tag_probe(self, tag, mask, remove):
        self.left_over -= 1
        return Found(self.left_over >= 0)

    def tag_recv_with_handle(self, buffer, found):
        return self


class Found:
    def __init__(self, matched: bool):
        self.matched = matched


def stuck_worker(stuck: Stuck) -> UcxWorker:
    worker = UcxWorker.__new__(UcxWorker)
    worker._library, worker._worker, worker._endpoint = load(), stuck, stuck
    return worker


@pytest.mark.parametrize("busy", [False, True])
def test_closing_ends_whatever_ucx_does_and_says_that_it_did_not_let_go(busy):
    began = time.monotonic()
    assert not stuck_worker(Stuck(busy)).close(lambda: False)
    assert RELEASE_S <= time.monotonic() - began < 2.0


def test_what_was_not_taken_in_whole_is_not_let_go():
    assert stuck_worker(Stuck()).close(lambda: True)
    assert not stuck_worker(Stuck(left_over=3)).close(lambda: True)


@pytest.mark.parametrize(
    ("transports", "borne"),
    [
        ("tcp,posix,self", MAX_ABANDONED), ("tcp", MAX_ABANDONED), ("rc,tcp", 0),
        ("tcp,posix,self,cuda_copy,cuda_ipc", 0), ("all", 0),
    ],
)  # fmt: skip
def test_only_where_nobody_else_writes_are_some_connections_left_behind(transports, borne):
    left = AbandonedConnections(transports)
    for _ in range(borne):
        left.add()
        left.check()
    left.add()
    with pytest.raises(MemoryNotQuiet):
        left.check()


def test_a_link_whose_memory_may_still_be_written_to_says_nothing_more_and_ends():
    told: list[str] = []
    faults: list[str] = []
    library = load()
    loop = UcxLoop(
        UcxLibrary(library.api, library.array, ""), {"TLS": "tcp,rc"}, None, lambda: None, lambda: None, faults.append
    )
    loop._options = {"TLS": "tcp,self"}
    with no_thread_left():
        loop.start()

        def close() -> None:
            worker = loop.open_worker(lambda progressed: False, lambda error: None)
            worker.close = lambda ended: False  # type: ignore[method-assign]
            loop.close_worker(worker, lambda: False)
            loop.submit(lambda: told.append("quiet"))

        loop.submit(close)
        wait_for(lambda: faults)
        loop.stop()
    assert "does not release" in faults[0]
    assert not told
