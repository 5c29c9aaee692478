"""Scenario of a simulated cluster and its runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

N = TypeVar("N")
"""A node."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One request of a trace.

    number      its place in the trace
    at          seconds of its arrival; with `after`, since the end of that request
    hashes      of the full blocks of its prompt and its output
    after       number of an earlier request, for a client that waits for its answer; -1: none
    session     what a client would send to be kept together
    """

    number: int
    at: float
    prompt_len: int
    output_len: int
    hashes: tuple[bytes, ...]
    after: int = -1
    session: str = ""
    model: str = "m"


@dataclass(slots=True, eq=False)
class RunOf(Generic[N]):
    """A request under way, from its arrival on.

    delivered: its output tokens that are out; attempt: how many nodes it lost; cached_len: of its first attempt, tokens
    reused where the prompt was computed; first_s and last_s: when its first and last token came; begun_s: when its
    prompt began to be computed; here: leading blocks that its decode node held when it made room; failed: nothing could
    take it; excluded: nodes that died under it."""

    ask: Scenario
    arrived: float
    prefill: N | None = None
    decode: N | None = None
    delivered: int = 0
    attempt: int = 0
    cached_len: int = -1
    first_s: float = -1.0
    last_s: float = -1.0
    begun_s: float = -1.0
    here: int = 0
    failed: bool = False
    excluded: set[str] = field(default_factory=set)

    @property
    def length(self) -> int:
        """Tokens whose KV must exist before the next one can be drawn."""
        return self.ask.prompt_len + self.delivered

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens."""
        gaps = self.ask.output_len - 1
        return (self.last_s - self.first_s) / gaps if gaps > 0 else 0.0


Run = RunOf[Any]
"""As the parts of a node know it: they look at none of its nodes."""
