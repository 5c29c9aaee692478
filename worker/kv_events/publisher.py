"""Publisher of a node's KV events: a thread with a ZeroMQ publisher, and a replay socket for missed batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from kvferry.engine.block_contents import BlockContents
from kvferry.engine.events import BlocksChanged, Event
from kvferry.kv_transfer.wakeup import Wakeup
from kvferry.protocol.errors import ConfigError
from kvferry.worker.kv_events.config import PARAM, KvEventsConfig, read_kv_events_config
from kvferry.worker.kv_events.event_encoder import EventEncoder
from kvferry.worker.service import NodeParts

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("kvferry.worker")

MAX_NOTED = 2**16
"""Maximum number of changes that wait for the thread; beyond it they are dropped and all blocks announced again."""
BATCH_BLOCKS = 512
"""Maximum number of blocks in one batch when all blocks are announced."""
UNREAD = 100_000
"""Number of messages that a slow reader may leave unread; further ones are dropped for that reader."""
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of a replay's last message."""
MAX_REQUEST_BYTES = 1024
"""Maximum size of a replay request in bytes."""
LINGER_MS, JOIN_S = 200, 2.0


def open_kv_events(base: NodeParts) -> KvEventPublisher | None:
    """Start the publisher that the settings ask for and return it; None if they ask for none. Raises ConfigError."""
    config = read_kv_events_config(base.settings.kv_events_config)
    if config is None:
        return None
    pool = base.parts.engine.pool
    pool.contents = BlockContents()

    def adapter_name(adapter_id: str) -> str:
        return next((each.name for each in base.adapters() if each.id == adapter_id), adapter_id)

    encoder = EventEncoder(pool.contents, base.parts.layout.block_size, adapter_name)
    return KvEventPublisher(config, pool.contents, encoder)


class KvEventPublisher:
    """Publisher of the blocks that become findable in a pool or are removed from it, off the engine thread.

    A message has three frames: topic, sequence number (8 bytes, big-endian, from 0) and a batch in msgpack:
    [seconds since 1970, events, 0]. `take` never blocks. Raises ConfigError if an address cannot be used."""

    def __init__(self, config: KvEventsConfig, contents: BlockContents, encoder: EventEncoder) -> None:
        import zmq

        self._contents, self._encoder = contents, encoder
        self._topic, self._ring = config.topic.encode(), ReplayRing(config.buffer_steps)
        self._number = 0
        self._lock, self._wakeup = threading.Lock(), Wakeup()
        self._notes: list[BlocksChanged] = []
        self._noted, self._lost, self._stopping = 0, False, False
        self._context = zmq.Context(1)
        replay, steps = config.replay_endpoint, config.buffer_steps
        self._socket = self._opened(zmq.PUB, config.endpoint, UNREAD)
        self._replays = None if replay is None else self._opened(zmq.ROUTER, replay, steps + 1)
        log.info("KV events at %s: anyone who can read them can read clients' prompts", config.endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def take(self, events: Sequence[Event]) -> None:
        """Note changes of the pool, on the engine thread."""
        changes = [event for event in events if isinstance(event, BlocksChanged)]
        if not changes:
            return
        with self._lock:
            self._notes += changes
            self._noted += sum(len(change.stored) + len(change.removed) for change in changes)
            if self._noted > MAX_NOTED:
                self._notes, self._noted, self._lost = [], 0, True
        self._wakeup.wake()

    def stop(self) -> None:
        """End the thread once it has published the queued changes; a second call does nothing."""
        with self._lock:
            stopped, self._stopping = self._stopping, True
        if not stopped:
            self._wakeup.wake()
            self._thread.join(JOIN_S)

    def _opened(self, kind: int, address: str, unread: int) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(kind)
        socket.linger, socket.sndhwm, socket.maxmsgsize = LINGER_MS, unread, MAX_REQUEST_BYTES
        try:
            binds = "*" in address or "::" in address or not address.startswith("tcp://") or kind == zmq.ROUTER
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            message = f"--kv-events-config: {address} cannot be used: {error}; choose another address"
            raise ConfigError(message, param=PARAM) from error
        return socket

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._wakeup.descriptor, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        while not self._stopping:
            try:
                ready = dict(poller.poll())
                if self._wakeup.descriptor in ready:
                    self._wakeup.reset(0)
                self._publish_noted()
                if self._replays in ready:
                    self._answer_replay()
            except Exception:
                log.exception("publishing KV events failed; all blocks are announced again")
                self._lost = True
        self._publish_noted()
        self._context.destroy(LINGER_MS)
        self._wakeup.close()

    def _publish_noted(self) -> None:
        with self._lock:
            notes, self._notes, self._noted = self._notes, [], 0
            lost, self._lost = self._lost, False
        if lost:
            self._publish([self._encoder.cleared()])
            known = self._contents.hashes()
            for first in range(0, len(known), BATCH_BLOCKS):
                self._publish(self._encoder.changed(known[first : first + BATCH_BLOCKS], ()))
        for change in notes:
            self._publish(self._encoder.changed(change.stored, change.removed))

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        batch: bytes = msgpack.packb([time.time(), events, 0])
        self._ring.put(self._number, batch)
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), batch))
        self._number += 1

    def _answer_replay(self) -> None:
        """Send one reader the kept batches from the number that it requests, then END."""
        assert self._replays is not None
        reader, *frames = self._replays.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            log.warning("ignoring a request for a replay of KV events in an unknown form")
            return
        for number, batch in self._ring.since(int.from_bytes(frames[1], "big")):
            self._replays.send_multipart((reader, b"", self._topic, number.to_bytes(8, "big"), batch))
        self._replays.send_multipart((reader, b"", b"", END, b""))


MAX_BYTES = 64 * 2**20
"""Maximum size of the kept batches in bytes, whatever their number."""


class ReplayRing:
    """Latest batches by sequence number. steps: maximum number of batches."""

    def __init__(self, steps: int, most_bytes: int = MAX_BYTES) -> None:
        self._steps, self._most_bytes = steps, most_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def put(self, number: int, batch: bytes) -> None:
        """Keep a batch; numbers ascend by one."""
        self._kept.append((number, batch))
        self._bytes += len(batch)
        while len(self._kept) > self._steps or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft()[1])

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kept batches from this number on."""
        if self._kept:
            skipped = max(0, start - self._kept[0][0])
            for index in range(skipped, len(self._kept)):
                yield self._kept[index]
