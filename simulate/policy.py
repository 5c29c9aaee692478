"""Policy: interface of routing policies in a simulation, which choose nodes and are notified of requests' progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvferry.simulate.fleet import Fleet
from kvferry.simulate.node import Node, Run


class Choice(NamedTuple):
    """Nodes of a request; prefill None: the decode node computes the prompt."""

    prefill: Node | None
    decode: Node


class Policy(Protocol):
    """Routing policy, which is notified of each request's progress."""

    def enter(self, fleet: Fleet) -> None:
        """Start with the fleet; called once, first."""

    async def choose(self, run: Run) -> Choice | None:
        """Choose the nodes of a request; None: it must wait at the router.

        Raises ContextLengthExceeded if it fits on no node, and Overloaded if it is rejected."""
        ...

    def launched(self, run: Run) -> None:
        """Report that the request goes to the chosen nodes, `run.prefill` and `run.decode`."""

    def first_token(self, run: Run) -> None:
        """Report that the prompt is computed."""

    def decoding(self, run: Run) -> None:
        """Report that the stream runs on its decode node."""

    def ended(self, run: Run) -> None:
        """Report that nothing of this attempt runs any more."""

    async def poll(self) -> None:
        """Refresh the view of the cluster; called every half second."""

    def displaced(self) -> Sequence[Run]:
        """Return the requests that gave way since the last call; they wait at the router from now on."""
        ...

    def lost(self, node: Node) -> None:
        """Report that the node died, as a router sees from its connections."""
