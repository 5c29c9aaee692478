"""CacheUse: a request's session and prefixes, for eviction; IdleStats: counts of evictions and returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

MAX_NAME = 64
"""Longest name of a session or retention that is kept, in characters."""


class Pause(StrEnum):
    """Why a session pauses: it got an answer, or its client runs a tool."""

    ANSWERED = "answered"
    TOOL = "tool"


@dataclass(slots=True, eq=False)
class CacheUse:
    """A request's use of cached blocks.

    tenant      namespace of the blocks; return rates are learned for each
    session     name of the session, unique among all tenants; empty: the session is recognised by its prefix
    request_id  by which the router reports why the session pauses
    retention   how long the client asked to keep the prefix; another class of pauses, not a promise
    pause       why the session pauses afterwards, if that is known by its end; tools: group of the tools that it called
                (protocol.sessions), 0 if unknown
    prompt      full blocks of its prompt that could be reused
    turns       earlier requests of the session
    shared      leading blocks that several sessions use
    known       its session is named, or its prompt begins with blocks of earlier prompts"""

    tenant: str = ""
    session: str = ""
    request_id: str = ""
    retention: str = ""
    pause: Pause = Pause.ANSWERED
    tools: int = 0
    prompt: int = 0
    turns: int = 0
    shared: int = 0
    known: bool = False


@dataclass(slots=True)
class IdleStats:
    """Figures of a pool's idle blocks.

    paused: sessions that pause now, with blocks of their own in the pool. evicted: blocks by kind. returns: requests
    that continued a session, by outcome (protocol.labels)."""

    paused: int = 0
    evicted: Counter[str] = field(default_factory=Counter)
    returns: Counter[str] = field(default_factory=Counter)

    def since(self, before: IdleStats) -> IdleStats:
        """Return the figures with counts since an earlier copy."""
        return IdleStats(self.paused, self.evicted - before.evicted, self.returns - before.returns)

    def copy(self) -> IdleStats:
        """Return a copy that stays as it is."""
        return IdleStats(self.paused, self.evicted.copy(), self.returns.copy())
