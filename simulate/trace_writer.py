"""Writer: builds synthetic request traces for the simulator: pieces of text, their hashes, random times and lengths."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.simulate.trace_request import Medium, TraceRequest

Piece = tuple[str, int]
"""Piece of text: an identifier of its content, and its length in tokens."""


def hashes_of(pieces: Sequence[Piece], block_size: int) -> tuple[bytes, ...]:
    """Return the hashes of the full blocks of consecutive pieces."""
    found: list[bytes] = []
    parent, part, room = b"", "", block_size
    for name, tokens in pieces:
        at = 0
        while tokens - at >= room:
            part += f"{name}:{at}+{room};"
            at += room
            parent = blake2b(parent + part.encode(), digest_size=HASH_BYTES).digest()
            found.append(parent)
            part, room = "", block_size
        if at < tokens:
            part += f"{name}:{at}+{tokens - at};"
            room -= tokens - at
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TraceParams:
    """Parameters of a workload: number of requests, arrivals per second, seed and block size. Raises ConfigError."""

    count: int
    rate: float
    seed: int = 0
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.count < 1 or not self.rate > 0:
            raise ConfigError("a trace needs at least one request and a rate above 0", param="rate")


class Writer:
    """Collects a trace, with random times and lengths."""

    def __init__(self, params: TraceParams, name: str) -> None:
        self.params, self.rng = params, random.Random(f"{params.seed}/{name}")
        self.trace: list[TraceRequest] = []

    @property
    def full(self) -> bool:
        """Return whether the trace has all requests."""
        return len(self.trace) >= self.params.count

    def times(self, rate: float) -> Iterator[float]:
        """Yield random arrival times in seconds, as a Poisson process."""
        now = 0.0
        while True:
            now += self.rng.expovariate(rate)
            yield now

    def length(self, median: int, spread: float = 0.6, least: int = 8) -> int:
        """Draw a log-normal text length."""
        return max(least, int(self.rng.lognormvariate(0.0, spread) * median))

    def request(
        self, at: float, prompt: Sequence[Piece], output: int, *, after: int = -1, session: str = "",
        tool: str = "", media: Collection[str] = (),
    ) -> Piece:  # fmt: skip
        """Add a request and return its output as a piece. media: names of the pieces that are pictures or clips."""
        number = len(self.trace)
        said = (f"out{number}", output)
        hashes = hashes_of([*prompt, said], self.params.block_size)
        length = sum(tokens for _, tokens in prompt)
        name = session or f"s{number}"
        starts = accumulate((tokens for _, tokens in prompt), initial=0)
        shown = tuple(
            Medium(piece, at, tokens) for (piece, tokens), at in zip(prompt, starts, strict=False) if piece in media
        )
        self.trace.append(TraceRequest(number, at, length, output, hashes, after, name, tool=tool, media=shown))
        return said

    def conversation(
        self, at: float, context: list[Piece], turns: int, said: int, output: int, pause_s: float,
        media: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Add a conversation whose client waits for each answer, then for `pause_s` on average."""
        session, after = f"s{len(self.trace)}", -1
        for turn in range(turns):
            context.append((f"{session}t{turn}", self.length(said)))
            number = len(self.trace)
            answer = self.request(at, context, self.length(output, least=4), after=after, session=session, media=media)
            context.append(answer)
            at, after = self.rng.expovariate(1 / pause_s), number
