"""Fault-injecting link for tests: wraps another link and drops, delays, repeats, corrupts and severs.

Like UCX, it may also write into abandoned receives until the link reports them quiet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.kv_transfer.link import Done, Link, LinkHandler, Peer
from kvferry.protocol.errors import KvferryError

LATE_BYTE = 0xEE
"""Value of the bytes that are written into abandoned receives."""


def _never(_: Any) -> bool:
    return False


@dataclass(slots=True)
class Faults:
    """Faults to inject: into control messages on the sending side, into blocks on the receiving side.

    drop and duplicate select messages; corrupt selects blocks by tag. delay_s returns the seconds by which a message is
    late; later messages may overtake it."""

    drop: Callable[[bytes], bool] = _never
    duplicate: Callable[[bytes], bool] = _never
    delay_s: Callable[[bytes], float] = lambda data: 0.0
    corrupt: Callable[[int], bool] = _never
    late_writes: bool = True


class FaultyLink:
    """Implements kv_transfer.link.Link over another link."""

    def __init__(self, link: Link, faults: Faults):
        self._link, self._faults = link, faults
        self._receives: dict[Peer, dict[int, Any]] = {}

    @property
    def address(self) -> str:
        return self._link.address

    def start(self, handler: LinkHandler) -> None:
        self._handler = handler
        self._link.start(handler)

    def stop(self) -> None:
        self._link.stop()

    def submit(self, call: Callable[[], None]) -> None:
        self._link.submit(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._link.call_later(delay_s, call)

    def connect(self, address: str) -> Peer:
        return self._link.connect(address)

    def send(self, peer: Peer, data: bytes) -> None:
        if self._faults.drop(data):
            return
        for _ in range(2 if self._faults.duplicate(data) else 1):
            if delay := self._faults.delay_s(data):
                self._link.call_later(delay, lambda: self._link.send(peer, data))
            else:
                self._link.send(peer, data)

    def send_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        self._link.send_block(peer, tag, buffer, done)

    def receive_block(self, peer: Peer, tag: int, buffer: Any, done: Done) -> None:
        receives = self._receives.setdefault(peer, {})
        receives[tag] = buffer

        def landed(error: Exception | None) -> None:
            if error is None:
                receives.pop(tag, None)
                if self._faults.corrupt(tag):
                    np.frombuffer(buffer, dtype=np.uint8)[0] ^= 1
            done(error)

        self._link.receive_block(peer, tag, buffer, landed)

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        def write_late() -> None:
            for buffer in self._receives.pop(peer, {}).values():
                if self._faults.late_writes:
                    np.frombuffer(buffer, dtype=np.uint8)[:] = LATE_BYTE
            quiet()

        self._link.disconnect(peer, write_late)

    def sever(self, peer: Peer, error: KvferryError) -> None:
        """Report the peer as lost to this end's handler, as after any other loss."""
        self._handler.peer_lost(peer, error)
