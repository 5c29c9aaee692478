"""Data types of tier reads: the request that awaits them, the read interface of a tier, and reserved pool blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engine.request import Request
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import Job


@dataclass(slots=True, eq=False)
class Reading:
    """Request that awaits reads, and the number of its reads."""

    request: Request
    job: Job
    turns: int = 0


Done = Callable[[KvferryError | None], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Read interface of a tier.

    seconds: expected time to read a number of blocks. read: reads a chain from an index to its end into blocks; False:
    not now."""

    name: str
    seconds: Callable[[int], float]
    read: Callable[[Sequence[bytes], int, Sequence[Any], Done], bool]


def local_source(tier: LocalTier[Any]) -> Source:
    """Return the read interface of one of the node's own tiers."""
    return Source(tier.name, tier.seconds, lambda hashes, at, into, done: tier.read(hashes[at:], into, done))


@dataclass(frozen=True, slots=True)
class Grant:
    """Reservation of pool blocks that a source fills."""

    source: Source
    number: int
