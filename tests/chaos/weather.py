"""What the link of a disturbed worker suffers."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from kvferry.protocol.errors import NodeLost
from tests.kv_transfer.fault_injection import Faults, FaultyLink

RESENT_S = (0.2, 0.8)
"""What a lost segment costs its connection until TCP has sent it again, once or twice."""


class Weather:
    """What the link suffers until `ends`: shares of control messages and blocks, and seconds. One instance per process,
    used on the link thread, written by the control thread."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.ends = 0.0
        self.share: dict[str, float] = {}
        self.delay_s = self.block_s = 0.0
        self.blocks_left = -1
        self.then = 0

    def set(self, seconds: float, delay_s: float = 0.0, block_s: float = 0.0, **share: float) -> None:
        self.ends, self.delay_s, self.block_s, self.share = time.monotonic() + seconds, delay_s, block_s, share

    def strikes(self, what: str) -> bool:
        return time.monotonic() < self.ends and self.rng.random() < self.share.get(what, 0.0)

    def delay(self, name: str) -> float:
        return float(getattr(self, name)) if time.monotonic() < self.ends else 0.0

    def block_passes(self) -> None:
        """Count down to the block at which this process is to be killed or stopped."""
        if self.blocks_left > 0:
            self.blocks_left -= 1
            if self.blocks_left == 0:
                os.kill(os.getpid(), self.then)


class StormyLink(FaultyLink):
    """A UCX link that suffers the weather. Late control messages stay in their order, as on any connection. `met`:
    peers, each with the time until which its messages are late."""

    def __init__(self, link: Any, weather: Weather) -> None:
        faults = Faults(
            drop=lambda data: weather.strikes("drop"),
            duplicate=lambda data: weather.strikes("duplicate"),
            corrupt=lambda tag: weather.strikes("corrupt"),
        )
        super().__init__(link, faults)
        self._weather = weather
        self.met: dict[Any, float] = {}
        self._late: dict[Any, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, peer: Any, data: bytes) -> None:
        now = time.monotonic()
        wait = self._weather.delay("delay_s")
        if self._weather.strikes("resent"):
            wait += self._weather.rng.uniform(*RESENT_S)
        due = max(self.met.get(peer, 0.0), now + wait)
        self.met[peer] = due
        if due > now:
            self._link.call_later(due - now, lambda: FaultyLink.send(self, peer, data))
        else:
            super().send(peer, data)

    def send_block(self, peer: Any, tag: int, buffer: Any, done: Any) -> None:
        self._weather.block_passes()
        self.met.setdefault(peer, 0.0)
        if not (wait := self._weather.delay("block_s")):
            self._link.send_block(peer, tag, buffer, done)
            return
        late = self._late.setdefault(peer, [])
        entry = ((len(late) and late[-1][0] + wait) or time.monotonic() + wait, done)
        late.append(entry)

        def post() -> None:
            if entry in self._late.get(peer, ()):
                late.remove(entry)
                self._link.send_block(peer, tag, buffer, done)

        self._link.call_later(max(entry[0] - time.monotonic(), 0.0), post)

    def receive_block(self, peer: Any, tag: int, buffer: Any, done: Any) -> None:
        self.met.setdefault(peer, 0.0)

        def landed(error: Exception | None) -> None:
            self._weather.block_passes()
            done(error)

        super().receive_block(peer, tag, buffer, landed)

    def disconnect(self, peer: Any, quiet: Any) -> None:
        self.met.pop(peer, None)
        for _, done in self._late.pop(peer, ()):
            done(NodeLost(f"{peer}: disconnected"))
        super().disconnect(peer, quiet)
