"""The loopback link on the virtual clock: its lanes are late by the weather, every write to a block is looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

from kvferry.engine.block_interfaces import Holds
from kvferry.kv_transfer.link import Peer
from kvferry.protocol.errors import NodeLost
from tests.kv_transfer.fault_injection import FaultyLink
from tests.kv_transfer.loopback import End, LoopbackLink, LoopbackNetwork
from tests.virtual.arithmetic import Arithmetic
from tests.virtual.clock import Process
from tests.virtual.wires import Lanes


class VirtualNetwork(LoopbackNetwork):
    """blame: told what must not happen."""

    def __init__(self, lanes: Lanes, blame: Callable[[str], None]) -> None:
        super().__init__()
        self.lanes, self.blame = lanes, blame

    def clock(self) -> float:
        return self.lanes.loop.time()

    def post(self, lane: Hashable, event: Callable[[], None], process: Process | None = None) -> None:
        self.lanes.post(("link", lane), process, event)


class LateLink(FaultyLink):
    """Of whose late writes each is looked at, too."""

    _link: VirtualLink

    def disconnect(self, peer: Peer, quiet: Callable[[], None]) -> None:
        buffers = self._receives.get(peer, {})

        def written() -> None:
            for buffer in buffers.values():
                self._link.check(buffer, "written late")
            quiet()

        super().disconnect(peer, written)


class VirtualLink(LoopbackLink):
    """Of one process. Blocks are moved by hardware: its process may be frozen meanwhile, not dead."""

    _network: VirtualNetwork

    def __init__(self, network: VirtualNetwork, address: str, process: Process, runner: Arithmetic, holds: Holds):
        super().__init__(network, address)
        self.process, self._runner, self._holds = process, runner, holds

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.process.soon(delay_s, self._alive, call)

    def cut(self, peer: Peer) -> None:
        """The connection breaks; each side notices in its own time."""
        end = self._ends[peer]
        other, end.other = end.other, None
        for side in filter(None, (end, other)):
            side.other = None
            side.link._event(("loss", side.peer), lambda side=side: side.link._lose(side.peer, NodeLost("cut")))

    def peers(self) -> list[Peer]:
        return [peer for peer, end in self._ends.items() if end.other is not None]

    def check(self, buffer: Any, what: str) -> None:
        """Nobody may touch a block that is not held."""
        if not isinstance(buffer, bytes) and not self._holds.held(block := self._runner.id_of(buffer)):
            self._network.blame(f"{self.process.name}: block {block} is {what}, but not held")

    def _alive(self, call: Callable[[], None]) -> None:
        if self.alive:
            call()

    def _event(self, lane: Hashable, call: Callable[[], None]) -> None:
        self._network.post(lane, lambda: self._alive(call), self.process)

    def _transfer(self, source: End, target: End, tag: int) -> None:
        if source.sends.get(tag) and target.receives.get(tag):
            cast(VirtualLink, source.link).check(source.sends[tag][0].buffer, "sent")
            cast(VirtualLink, target.link).check(target.receives[tag][0].buffer, "written")
        super()._transfer(source, target, tag)
