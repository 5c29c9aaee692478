"""TraceRequest, one request of a simulated trace, and RequestRun, its state while it is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from kvferry.engine.cache_use import CacheUse, Pause
from kvferry.protocol.sessions import tool_group

N = TypeVar("N")
"""Type of node."""


class Medium(NamedTuple):
    """A picture or clip of a prompt: the name of its content, and the tokens that stand for it."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    number      its position in the trace
    at          seconds of its arrival; with `after`, since the end of that request
    hashes      of the full blocks of its prompt and its output
    after       number of an earlier request, for a client that waits for its answer; -1: none
    session     key that a client would send for session affinity
    tool        name of the tool that its output calls; empty: none
    background  nobody waits for it, as for a batch's rows: it gives way to requests with targets
    media       pictures and clips of its prompt"""

    number: int
    at: float
    prompt_len: int
    output_len: int
    hashes: tuple[bytes, ...]
    after: int = -1
    session: str = ""
    model: str = "m"
    tool: str = ""
    background: bool = False
    media: tuple[Medium, ...] = ()

    @property
    def cache_use(self) -> CacheUse:
        """Return its use of a pool's cached blocks; the pool recognises the session by its prefix."""
        return CacheUse(pause=Pause.TOOL, tools=tool_group((self.tool,))) if self.tool else CacheUse()


@dataclass(slots=True, eq=False)
class RequestRun(Generic[N]):
    """Request in the simulation, from its arrival on.

    delivered: output tokens delivered. attempt: number of attempts that ended early, because a node was lost or a
    request with targets took its place. cached_len: tokens reused where the prompt was computed, in the first attempt.
    first_s, last_s: times of the first and last token. begun_s: time at which the prompt started. here: leading blocks
    that the decode node held when it granted. encode_tokens: of media that the prompt's node encodes itself. failed: it
    fits on no node, or was rejected."""

    ask: TraceRequest
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
    encode_tokens: int = 0
    failed: bool = False
    rejected: bool = False

    @property
    def length(self) -> int:
        """Return the tokens whose KV must exist before the next one can be drawn."""
        return self.ask.prompt_len + self.delivered

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self.failed or self.delivered >= self.ask.output_len

    @property
    def ttft_s(self) -> float:
        """Return the time to first token, in seconds."""
        return self.first_s - self.arrived

    @property
    def itl_s(self) -> float:
        """Return the mean time between its tokens, in seconds."""
        gaps = self.ask.output_len - 1
        return (self.last_s - self.first_s) / gaps if gaps > 0 else 0.0


Run = RequestRun[Any]
"""Run as parts of a node use it; they do not access its nodes."""
