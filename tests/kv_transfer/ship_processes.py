"""A prefill process for tests over the real link: offers a ship to the parent's receiver and obeys its pipe."""

from __future__ import annotations

import queue

import numpy as np

from kvferry.kv_transfer.dock import Dock
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.sender import Sender
from kvferry.kv_transfer.ucx import UcxLink
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.kv_transfer.link_processes import pattern


class Memory(BlockMemory):
    def __init__(self, blocks: int, size: int):
        self.blocks = np.zeros((blocks, size), dtype=np.uint8)

    def block(self, block_id: int) -> np.ndarray:
        return self.blocks[block_id % len(self.blocks)]


class Events:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue = queue.SimpleQueue()

    def granted(self, transfer, first_block):
        self.queue.put(("granted", transfer, first_block))

    def sent(self, transfer):
        """Of no interest to the parent."""

    def done(self, transfer, stats):
        self.queue.put(("done", transfer, stats))

    def failed(self, transfer, error):
        self.queue.put(("failed", transfer, f"{error.code}: {error.message}"))

    def quiet(self, transfer):
        self.queue.put(("quiet", transfer, None))


def make_job(blocks: int, tokens: int = 0) -> Job:
    ids = tuple(range(tokens or blocks * 16))
    return Job("request", 1, ids, len(ids), Generate(SamplingParams()), "router")


def delta() -> TokenDelta:
    return TokenDelta("request", 1, 0, (7,))


def prefill_process(pipe, target, blocks: int, size: int, options: dict) -> None:
    """Child. Commands: ("offer", prompt tokens), ("ship", first, last), ("commit",), ("abort",), ("next",): answer with
    the next event, ("stop",). A prompt of more blocks than there are sends them again and again."""
    link = UcxLink("127.0.0.1", **options)
    memory, events = Memory(blocks, size), Events()
    for index in range(blocks):
        memory.blocks[index] = pattern(index, size)
    dock = Dock(link, memory)
    sender = Sender(dock, events)
    dock.start()
    transfer = 0
    pipe.send("started")
    while (command := pipe.recv())[0] != "stop":
        if command[0] == "offer":
            transfer = sender.offer(target, make_job(blocks, command[1]))
        elif command[0] == "ship":
            sender.ship(transfer, [(i, i) for i in range(command[1], command[2])])
        elif command[0] == "commit":
            sender.commit(transfer, delta())
        elif command[0] == "abort":
            sender.abort(transfer, "test")
        elif command[0] == "next":
            pipe.send(events.queue.get(timeout=20))
    link.stop()
