"""Interface of routing policies in a simulation."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvferry.simulate.fleet import Fleet
from kvferry.simulate.node import Node, Run


class Choice(NamedTuple):
    """prefill None: the decode node computes the prompt."""

    prefill: Node | None
    decode: Node


class Policy(Protocol):
    """Told of each request's way.

    `choose` answers None while it must wait at the router, and raises ContextLengthExceeded where it fits nowhere."""

    def enter(self, fleet: Fleet) -> None:
        """The fleet is there; once, first."""

    async def choose(self, run: Run) -> Choice | None: ...

    def launched(self, run: Run) -> None:
        """It goes where `choose` said, which `run.prefill` and `run.decode` tell now."""

    def first_token(self, run: Run) -> None:
        """Its prompt is computed."""

    def decoding(self, run: Run) -> None:
        """It runs on its decode node."""

    def ended(self, run: Run) -> None:
        """Record that nothing of this attempt runs any more."""

    async def poll(self) -> None:
        """Half a second passed."""

    def lost(self, node: Node) -> None:
        """The node died, as its connections tell."""
