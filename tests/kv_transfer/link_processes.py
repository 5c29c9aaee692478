"""Link ends for tests that need real processes: a recording handler, and children driven over a pipe."""

from __future__ import annotations

import multiprocessing as mp
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np

from tests.waiting import wait_for

SPAWN = mp.get_context("spawn")


class Recorder:
    """A LinkHandler that keeps what it hears and runs `on_message` where given."""

    def __init__(self, on_message: Callable[[object, bytes], object] | None = None):
        self.messages: list[tuple[object, bytes]] = []
        self.lost: list[tuple[object, Exception]] = []
        self.on_message = on_message

    def message(self, peer, data):
        self.messages.append((peer, data))
        if self.on_message:
            self.on_message(peer, data)

    def peer_lost(self, peer, error):
        self.lost.append((peer, error))


def pattern(index: int, size: int) -> np.ndarray:
    """Bytes that differ from block to block and within a block."""
    return np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)


@contextmanager
def no_thread_left():
    """No link's thread that begins in here outlives it; what another test left is not its fault."""
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-link" and thread not in before]


@contextmanager
def child(target: Callable, *args):
    """Run target(pipe, *args) in a spawned process; yields (process, pipe) and ends it whatever happens."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_guarded, args=(target, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(10)


def _guarded(target, pipe, *args):
    try:
        target(pipe, *args)
    except Exception:
        traceback.print_exc()
        raise


def send_blocks(pipe, address: str, count: int, size: int, options: dict) -> None:
    """Child: connect, send a greeting, then `count` blocks with tags 1 << 40 | index; answer commands from the pipe:
    ("send", first, last) posts those blocks, ("message", bytes) sends it, ("stop",) ends."""
    from kvferry.kv_transfer.ucx import UcxLink

    link = UcxLink(**{"host": "127.0.0.1"} | options)
    recorder = Recorder()
    link.start(recorder)
    blocks = [pattern(i, size) for i in range(count)]
    done: list[Exception | None] = []
    peers: list[object] = []
    link.submit(lambda: peers.append(link.connect(address)))
    wait_for(lambda: peers)
    pipe.send("ready")
    while (command := pipe.recv())[0] != "stop":
        if command[0] == "send":
            for i in range(command[1], command[2]):
                link.submit(lambda i=i: link.send_block(peers[0], 1 << 40 | i, blocks[i], done.append))
        elif command[0] == "message":
            link.submit(lambda data=command[1]: link.send(peers[0], data))
        elif command[0] == "wait":
            wait_for(lambda n=command[1]: len(done) == n, 20)
            pipe.send([str(e) for e in done if e])
    link.stop()


def listen(pipe, port: int) -> None:
    """Child: listen on the port and pass on what is heard until killed."""
    from kvferry.kv_transfer.ucx import UcxLink

    link = UcxLink("127.0.0.1", port)
    link.start(Recorder(lambda peer, data: pipe.send(data)))
    pipe.send("listening")
    pipe.poll(60)
