"""Peers of one link that die or freeze in the middle of a block, and one that stays well: does the link go on hearing
the latter? As a script: python wedging.py FREEZES ROUNDS_OF_KILLS
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from contextlib import ExitStack

import numpy as np

from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.tags import block_tag
from kvferry.kv_transfer.ucx import UcxLink
from tests.kv_transfer.link_processes import Recorder, child, pattern
from tests.waiting import wait_for

SIZE = 368_640
AHEAD = 8
"""Blocks that stand ready to be received, and that the sending side has posted."""
HEALTHY_S = 3.0
"""What a message and a block of the peer that is well may take; without a fault they take some milliseconds."""
SILENCE_S = 1.5


def sending(pipe, address: str, number: int) -> None:
    """Child: connect, say the number, then obey. ("flood",): send blocks for as long as anybody takes them; ("one",):
    a message and a block, answered once the block left; ("again",): connect anew."""
    link = UcxLink("127.0.0.1", silence_limit=SILENCE_S, ping_interval=0.2)
    link.start(Recorder())
    block = pattern(number, SIZE)
    peers: list[Peer] = []

    def send(then) -> None:
        link.submit(lambda: link.send_block(peers[-1], block_tag(number, 0, 0), block, then))

    def hello() -> None:
        peers.append(link.connect(address))
        link.send(peers[-1], b"%d" % number)

    link.submit(hello)
    while True:
        match pipe.recv():
            case ("flood",):
                for _ in range(AHEAD):
                    send(lambda error: None if error else send(_then(send)))
            case ("one",):
                link.submit(lambda: link.send(peers[-1], b"%d" % number))
                send(lambda error: pipe.send(error is None))
            case ("again",):
                link.submit(hello)


def _then(send):
    return lambda error: None if error else send(_then(send))


class Receiving:
    """The link under test. Keeps receives posted for every peer; counts what arrived, by the peers' numbers."""

    def __init__(self) -> None:
        self.link = UcxLink("127.0.0.1", silence_limit=SILENCE_S, ping_interval=0.2)
        self.recorder = Recorder(self._message)
        self.recorder.peer_lost = self._lost  # type: ignore[method-assign]
        self.blocks: dict[int, int] = {}
        self.messages: dict[int, int] = {}
        self.connected: dict[int, Peer] = {}
        self._memory: list[np.ndarray] = []
        self.link.start(self.recorder)

    def _message(self, peer: Peer, data: bytes) -> None:
        number = int(data)
        self.messages[number] = self.messages.get(number, 0) + 1
        if self.connected.get(number) == peer:
            return
        self.connected[number] = peer
        self.blocks.setdefault(number, 0)
        for _ in range(AHEAD):
            self._memory.append(np.zeros(SIZE, dtype=np.uint8))
            self._receive(number, peer, self._memory[-1])

    def _receive(self, number: int, peer: Peer, buffer: np.ndarray) -> None:
        def landed(error: Exception | None) -> None:
            if error is None:
                self.blocks[number] += 1
                self._receive(number, peer, buffer)

        self.link.receive_block(peer, block_tag(number, 0, 0), buffer, landed)

    def _lost(self, peer: Peer, error: Exception) -> None:
        for number in [number for number, known in self.connected.items() if known == peer]:
            del self.connected[number]
        self.link.disconnect(peer, lambda: None)

    def hears(self, pipe, number: int) -> bool:
        """Whether a message and a block of this peer arrive in time."""
        before = self.messages.get(number, 0), self.blocks.get(number, 0)
        pipe.send(("one",))
        with contextlib.suppress(AssertionError):
            wait_for(lambda: self.messages[number] > before[0] and self.blocks[number] > before[1], HEALTHY_S)
            return True
        return False


def flooding(side: Receiving, pipe, number: int) -> None:
    wait_for(lambda: number in side.connected, 20)
    pipe.send(("flood",))
    before = side.blocks[number]
    wait_for(lambda: side.blocks[number] > before + AHEAD, 20)


def freezes(count: int, seed: int = 1) -> int:
    """How often the link was deaf to the peer that was well, while another was frozen in mid-ship."""
    draw, deaf, side = random.Random(seed), 0, Receiving()
    with child(sending, side.link.address, 1) as (_, well), child(sending, side.link.address, 2) as (victim, pipe):
        wait_for(lambda: 1 in side.connected, 20)
        for _ in range(count):
            flooding(side, pipe, 2)
            time.sleep(draw.random() * 0.02)
            os.kill(victim.pid, signal.SIGSTOP)
            heard = side.hears(well, 1)
            deaf += not heard
            wait_for(lambda: 2 not in side.connected, 20)
            os.kill(victim.pid, signal.SIGCONT)
            if not heard:
                assert well.poll(20), "deaf for good"
            well.recv()
            time.sleep(0.1)
            pipe.send(("again",))
    side.link.stop()
    return deaf


def kills(rounds: int, at_once: int = 4, seed: int = 1) -> int:
    """How many rounds of peers killed in mid-ship it took until the link was deaf to the peer that was well; 0: it
    never was."""
    draw, side = random.Random(seed), Receiving()
    with child(sending, side.link.address, 1) as (_, well), ExitStack() as victims:
        wait_for(lambda: 1 in side.connected, 20)
        for start in range(2, 2 + rounds * at_once, at_once):
            numbers = range(start, start + at_once)
            started = [victims.enter_context(child(sending, side.link.address, number)) for number in numbers]
            for (_, pipe), number in zip(started, numbers, strict=True):
                flooding(side, pipe, number)
            time.sleep(draw.random() * 0.02)
            for victim, _ in started:
                os.kill(victim.pid, signal.SIGKILL)
            if not side.hears(well, 1):
                return (start + at_once - 2) // at_once
            well.recv()
    side.link.stop()
    return 0


if __name__ == "__main__":
    began = time.monotonic()
    print("freezes", sys.argv[1], "deaf", freezes(int(sys.argv[1])), f"{time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    print("kills", sys.argv[2], "deaf at", kills(int(sys.argv[2])), f"{time.monotonic() - began:.1f} s", flush=True)
    os._exit(0)
