"""CPU cores that several simulated nodes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.simulate.machine import Machine

LEAST = 0.05
"""Of their speed that streams have, however much prompts take."""


class Computing(Protocol):
    """A node that computes on shared cores."""

    role: str
    machine: Machine


class Cores:
    """Prompts and streams of different nodes take turns on them: while both are there, a prefill node has the share of
    its speed that its machine calls `beside`, and a decode node the rest."""

    def __init__(self) -> None:
        self._nodes: dict[Computing, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._working: set[Computing] = set()

    def join(self, node: Computing, advance: Callable[[], None], go_on: Callable[[], None]) -> None:
        """One more computes here; it is told to go to now as planned, and to plan anew."""
        self._nodes[node] = advance, go_on

    def share(self, node: Computing) -> float:
        """Return the share of full speed that the node has."""
        if not any(each.role != node.role for each in self._working):
            return 1.0
        beside = node.machine.beside
        return beside if node.role == "prefill" else max(LEAST, 1 - beside)

    def works(self, node: Computing, works: bool) -> None:
        """Return whether it has anything to compute. What others did until now was at the speed that they had."""
        if works == (node in self._working):
            return
        others = [told for each, told in self._nodes.items() if each.role != node.role]
        for advance, _ in others:
            advance()
        (self._working.add if works else self._working.discard)(node)
        for _, go_on in others:
            go_on()
