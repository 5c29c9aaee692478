"""KnownPauses: an eviction order that knows the true distributions of pauses and of the turns of a session.

It knows what can be known without the future, so it shows how much of the way to the oracle an order that learns could
go. A block is worth the sum of the Gittins indices (engine/return_rates.py) of the sessions that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvferry.engine.cache_use import CacheUse
from kvferry.simulate.eviction import KnownBlocks
from kvferry.simulate.memory import Memory
from kvferry.simulate.trace_request import TraceRequest

KNOWN = "known distributions"
STEP_S = 0.1
"""Resolution of pauses, in seconds."""
MAX_KEPT_STEPS = 900
"""Longest time for which an index considers keeping a block, in steps."""


class Pauses(Protocol):
    """True distributions of a trace. shared: returns per second to blocks of several sessions, by other sessions."""

    shared: float

    def value(self, ask: TraceRequest, idle_s: float) -> float:
        """Return the Gittins index of a session, in returns per second, `idle_s` after its last request ended."""
        ...


def gittins(pauses_s: Iterable[float], chance: float) -> Sequence[float]:
    """Return the Gittins index by age in steps.

    pauses_s: samples of the pauses of sessions that return. chance: probability that a session returns."""
    counts = Counter(int(pause_s / STEP_S) for pause_s in pauses_s)
    total, steps = sum(counts.values()), max(counts) + 1
    returns = [chance * counts[step] / total for step in range(steps)]
    alive = [1.0]
    for each in returns:
        alive.append(alive[-1] - each)
    found = []
    for age in range(steps):
        best = gain = spent = 0.0
        for step in range(age, min(steps, age + MAX_KEPT_STEPS)):
            gain += returns[step]
            spent += (alive[step] - returns[step] / 2) * STEP_S
            best = max(best, gain / max(spent, 1e-9))
        found.append(best)
    return found if chance == 1 else [*found, 0.0]


def at_age(indices: Sequence[float], idle_s: float) -> float:
    """Return the index at an age; at ages beyond all pauses the last one, which is 0 if sessions may end."""
    return indices[min(max(0, int(idle_s / STEP_S)), len(indices) - 1)]


class KnownPauses(KnownBlocks):
    """Evicts the leaf whose sessions are least likely to return soon, by their true distributions.

    asks: requests by number; a CacheUse names its request's number in request_id."""

    def __init__(
        self, pool: Memory, asks: Mapping[int, TraceRequest], clock: Callable[[], float], pauses: Pauses
    ) -> None:
        super().__init__(pool)
        self._asks, self._clock, self._pauses = asks, clock, pauses
        self._users: dict[bytes, set[str]] = {}
        self._paused: dict[str, tuple[float, TraceRequest]] = {}
        self._leaves: dict[int, None] = {}

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Note that the request's session pauses no longer."""
        self._paused.pop(self._asked(cache_use)[0], None)

    def rest(self, cache_use: CacheUse, block_ids: Sequence[int]) -> None:
        """Note that the request's session pauses, and that it uses these blocks."""
        session, ask = self._asked(cache_use)
        self._paused[session] = self._clock(), ask
        for block_id in block_ids:
            self._users.setdefault(self._hash(block_id), set()).add(session)

    def put(self, block_id: int, *, leaf: bool) -> None:
        self._idle[block_id] = None
        if leaf:
            self.became_leaf(block_id)

    def became_leaf(self, block_id: int) -> None:
        if block_id in self._idle:
            self._leaves[block_id] = None

    def remove(self, block_id: int) -> None:
        super().remove(block_id)
        self._leaves.pop(block_id, None)

    def pop(self) -> int:
        """Remove and return the least valuable leaf."""
        values: dict[str, float] = {}
        block_id = min(self._leaves, key=lambda each: self._value(self._users.get(self._hash(each), set()), values))
        self.remove(block_id)
        return block_id

    def _value(self, sessions: set[str], values: dict[str, float]) -> float:
        """Return the value of a block of these sessions; `values` keeps those of sessions."""
        for session in sessions - values.keys():
            since, ask = self._paused.get(session, (0.0, None))
            values[session] = 0.0 if ask is None else self._pauses.value(ask, self._clock() - since)
        return sum(values[session] for session in sessions) + self._pauses.shared * (len(sessions) > 1)

    def _asked(self, cache_use: CacheUse) -> tuple[str, TraceRequest]:
        """Return a request's session, and the request; one without a session is one of its own."""
        ask = self._asks[int(cache_use.request_id)]
        return ask.session or f"once {ask.number}", ask
