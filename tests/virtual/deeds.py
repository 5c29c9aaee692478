"""What goes wrong, as a plan says it: processes die and freeze, connections break, the registry is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.virtual.clock import Process, State
from tests.virtual.plan import Fault


def living(them: list) -> list:
    return [each for each in them if each.process.state is not State.DEAD]


class Deeds:
    """The part of a world that breaks it."""

    loop: Any
    nodes: list
    routers: list
    wires: Any
    store: Any
    healed: bool
    _start_node: Callable[[str, int], Any]
    _start_router: Callable[[], Any]

    def do(self, fault: Fault) -> None:
        if not self.healed:
            getattr(self, f"_{fault.kind}")(fault)

    def _kill(self, fault: Fault) -> None:
        at = fault.where % len(self.nodes)
        node = self.nodes[at]
        if node.process.state is not State.DEAD:
            node.kill()
            self.loop.call_later(fault.for_s, self.restart, at)

    def _drain(self, fault: Fault) -> None:
        """The node ends once nothing is under way there, and comes again."""
        at = fault.where % len(self.nodes)
        node = self.nodes[at]

        async def leave() -> None:
            await node.drain()
            self.loop.call_soon(self._ended, node, at, fault.for_s, context=self.loop.bare)

        if node.ready and not node.leaving and node.process.state is not State.DEAD:
            node.leaving = True
            node.process.task(leave())

    def _role(self, fault: Fault) -> None:
        """The node is asked to take the other role."""
        node = self.nodes[fault.where % len(self.nodes)]
        if node.ready and not node.leaving and node.process.state is not State.DEAD:
            node.process.task(node.change_role())

    def _ended(self, node: Any, at: int, for_s: float) -> None:
        node.kill()
        self.loop.call_later(for_s, self.restart, at)

    def restart(self, at: int) -> None:
        node = self.nodes[at]
        if node.process.state is State.DEAD:
            self.nodes[at] = self._start_node(node.role, node.port)

    def _freeze(self, fault: Fault) -> None:
        self._stop(self.nodes[fault.where % len(self.nodes)].process, fault.for_s)

    def _freeze_router(self, fault: Fault) -> None:
        self._stop(self.routers[fault.where % len(self.routers)].process, fault.for_s)

    def _stop(self, process: Process, for_s: float) -> None:
        process.freeze()
        self.loop.call_later(for_s, process.thaw)

    def _kill_router(self, fault: Fault) -> None:
        at = fault.where % len(self.routers)
        self.routers[at].kill()
        self.routers[at] = self._start_router()

    def _cut_link(self, fault: Fault) -> None:
        links = [node.inner for node in living(self.nodes) if node.role == "decode" and node.joined]
        cuts = [(link, peer) for link in links for peer in link.peers()]
        if cuts:
            link, peer = cuts[fault.where % len(cuts)]
            link.cut(peer)

    def _cut_wire(self, fault: Fault) -> None:
        wires = [end for end in self.wires.ends if end.other is not None]
        if wires:
            self.wires.cut(wires[fault.where % len(wires)])

    def _registry_away(self, fault: Fault) -> None:
        everybody = [*self.nodes, *self.routers]
        store = everybody[fault.where % len(everybody)].store
        store.away = True
        self.loop.call_later(fault.for_s, setattr, store, "away", False)

    def _flush(self, fault: Fault) -> None:
        self.store.flush()

    def _slow_turn(self, fault: Fault) -> None:
        node = self.nodes[fault.where % len(self.nodes)]
        if node.joined:
            node.loop_engine.slow_s = fault.for_s
