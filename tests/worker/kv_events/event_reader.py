"""A reader of a node's KV events, as other projects' routers have one: it rebuilds what the node's pool holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from kvferry.protocol.hashing import chain, root_hash
from tests.toy import FINGERPRINT

PATIENCE_S = 10.0


@dataclass
class EventReader:
    """Blocks by the hash in the events, from batches without a gap. It hashes all tokens anew."""

    socket: zmq.Socket[bytes]
    namespace: str = ""
    topic: bytes = b""
    number: int = -1
    types: list[str] = field(default_factory=list)
    blocks: dict[int, bytes] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Apply all messages that have arrived."""
        while self.socket.poll(0):
            self.apply(*self.socket.recv_multipart())

    def apply(self, topic: bytes, number: bytes, batch: bytes) -> None:
        """Apply one message."""
        assert topic == self.topic
        assert len(number) == 8
        assert int.from_bytes(number, "big") == self.number + 1, "a batch is missing"
        self.number += 1
        told, events, rank = msgpack.unpackb(batch)
        assert abs(time.time() - told) < 60
        assert rank == 0
        for event in events:
            self.events.append(event)
            self.types.append(event["type"])
            getattr(self, f"_{event['type']}")(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:
        size, tokens = event["block_size"], event["token_ids"]
        hashes, parent = event["block_hashes"], event["parent_block_hash"]
        assert len(tokens) == size * len(hashes)
        assert (event["medium"], event["group_idx"]) == ("GPU", 0)
        before = root_hash(FINGERPRINT, self.namespace) if parent is None else self.blocks[parent]
        for told, own in zip(hashes, chain(before, tokens, size), strict=True):
            assert told not in self.blocks, "told twice"
            self.blocks[told], self.parents[told] = own, parent
            parent = told

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        for told in event["block_hashes"]:
            assert told not in self.parents.values(), "a block is removed before its descendants"
            del self.blocks[told], self.parents[told]

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        assert event == {"type": "AllBlocksCleared"}
        self.blocks.clear()
        self.parents.clear()


@contextlib.contextmanager
def reading(endpoint: str, **options: Any) -> Iterator[EventReader]:
    """A reader that subscribes at this address."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    try:
        yield EventReader(socket, **options)
    finally:
        context.destroy(0)


def replayed(endpoint: str, start: int, frames: tuple[bytes, ...] | None = None) -> list[list[bytes]]:
    """What the replay socket answers to a reader that asks from this number on: frames of each message."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart(frames or (b"", start.to_bytes(8, "big")))
    found: list[list[bytes]] = []
    try:
        while socket.poll(int(PATIENCE_S * 1000)):
            empty, *rest = socket.recv_multipart()
            assert empty == b""
            if rest[1] == b"\xff" * 8:
                assert (rest[0], rest[2]) == (b"", b"")
                return found
            found.append(rest)
        raise AssertionError("the replay does not end")
    finally:
        context.destroy(0)
