"""Cores: CPU cores that a prefill and a decode node share in the simulation, so that each slows the other down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.simulate.machine import Machine

LEAST = 0.05
"""Minimum share of full speed that streams keep beside prompts."""


class Computing(Protocol):
    """Simulated node that computes on shared cores."""

    role: str
    machine: Machine


class Cores:
    """Cores on which prefill and decode nodes take turns.

    While both roles work, a prefill node has the share `beside` of its machine's speed, and a decode node has the rest.
    """

    def __init__(self) -> None:
        self._nodes: dict[Computing, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._working: set[Computing] = set()

    def join(self, node: Computing, advance: Callable[[], None], replan: Callable[[], None]) -> None:
        """Add a node.

        advance: brings its state to the current time at the old speed. replan: plans its next event again."""
        self._nodes[node] = advance, replan

    def share(self, node: Computing) -> float:
        """Return the share of full speed that the node has."""
        if not any(each.role != node.role for each in self._working):
            return 1.0
        beside = node.machine.beside
        return beside if node.role == "prefill" else max(LEAST, 1 - beside)

    def works(self, node: Computing, works: bool) -> None:
        """Set whether the node is computing; the other role's nodes advance first and then plan again.

        Their work until now was done at the old speed."""
        if works == (node in self._working):
            return
        others = [calls for each, calls in self._nodes.items() if each.role != node.role]
        for advance, _ in others:
            advance()
        (self._working.add if works else self._working.discard)(node)
        for _, replan in others:
            replan()
