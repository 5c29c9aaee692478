"""ReturnRates: learned rates at which idle blocks are used again, by their age; the eviction order ranks by them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp
from operator import mul

FIRST_S, GROWTH, BINS = 0.25, 2**0.5, 32
"""End of the first age bin in seconds, ratio of two ends, and number of bins; the last one begins after two hours."""
ENDS = tuple(FIRST_S * GROWTH**place for place in range(BINS - 1))
"""End of each age bin but the last, in seconds."""
_STARTS = (0.0, *ENDS)
_WIDTHS = tuple(end - start for start, end in zip(_STARTS, (*ENDS, 2 * ENDS[-1]), strict=True))
PRIOR_S = 10.0
"""Before any observation, blocks of age a return at a rate of 1 / (a + PRIOR_S): recently used ones are worth more."""
_FIRST = tuple(1 / (start + PRIOR_S) for start in _STARTS)
MEMORY = 512.0
"""Chains whose end was seen, after which a class counts the older ones half."""
PRIOR, PRIOR_BIN, PRIOR_ALIKE = 4.0, 2.0, 6.0
"""Weights of the wider class in the rates of one class, in returns: how often its chains return, when they do, and
when they do in classes by turns, whose pauses are alike: more of them end after some turns than after others."""
BESIDE = 0.5
"""Weight of the two bins beside an age bin in its rate."""
SINGLE_TURNS, MAX_TURN_LEVEL = 16, 20
"""Number of prompts of a session from which on levels are logarithms, and the highest level (256 prompts and more)."""
NEWS = 0.02
"""Share of a class's remembered observations that must change before its values are recomputed."""


class ReturnRates:
    """Rates of return of one class of chains, by age.

    Each age bin counts returns, and the time that chains spent in it: chains that were not used again so far count, too
    (occurrence/exposure rates). `parent` is a wider class, whose rates count where this one has seen little. Memory is
    fixed, and old observations fade. Weights are shares of a chain: 1 is a whole one."""

    __slots__ = ("_exposed", "_parent", "_prior", "_returns", "_seen", "_stale", "_values")

    def __init__(self, parent: ReturnRates | None = None, prior: float = PRIOR_BIN) -> None:
        self._parent, self._prior = parent, prior
        self._returns, self._exposed = [0.0] * BINS, [0.0] * BINS
        self._seen = self._stale = 0.0
        self._values: tuple[float, ...] = ()

    def exposed(self, place: int, seconds: float, weight: float) -> None:
        """Count the time that chains of this weight spent in an age bin."""
        self._exposed[place] += seconds * weight
        self._stale += weight / BINS
        if self._parent is not None:
            self._parent.exposed(place, seconds, weight)

    def returned(self, place: int, weight: float) -> None:
        """Count chains of this weight that were used again at an age in this bin."""
        self._returns[place] += weight
        self._end(weight)
        if self._parent is not None:
            self._parent.returned(place, weight)

    def lost(self, weight: float) -> None:
        """Count chains of this weight that were forgotten before they were used again."""
        self._end(weight)
        if self._parent is not None:
            self._parent.lost(weight)

    def rates(self) -> Sequence[float]:
        """Return the returns per second of a chain, by age bin.

        A class that has seen little follows the wider one, times the ratio of its own returns to those expected by the
        wider class's rates: chains that never returned so far are unlikely to return later."""
        before = _FIRST if self._parent is None else self._parent.rates()
        expected = sum(map(mul, self._exposed, before))
        ratio = (sum(self._returns) + PRIOR) / (expected + PRIOR)
        found = []
        for place, rate in enumerate(before):
            seen, seen_s = _around(self._returns, place), _around(self._exposed, place)
            found.append((seen + self._prior) / (seen_s + self._prior / (ratio * rate)))
        return found

    def values(self) -> Sequence[float]:
        """Return, by age bin, the highest rate of returns per second that keeping a block of that age can give.

        That is the highest ratio, over all times to keep it, of the chance that it returns meanwhile to the expected
        time until it returns or is given up (Gittins index). A block that returns in a minute or never is worth more
        just before that minute ends than at its beginning."""
        if not self._values or self._stale > NEWS * (1 + min(self._seen, MEMORY)):
            self._values, self._stale = _indices(self.rates()), 0.0
        return self._values

    def _end(self, weight: float) -> None:
        self._seen += weight
        self._stale += weight
        if self._seen > MEMORY:
            self._seen /= 2
            self._returns = [each / 2 for each in self._returns]
            self._exposed = [each / 2 for each in self._exposed]


def _around(counts: Sequence[float], place: int) -> float:
    """Return the count of an age bin and half of those beside it, since a bin alone sees few returns."""
    return counts[place] + BESIDE * (sum(counts[max(0, place - 1) : place + 2]) - counts[place])


def _indices(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the Gittins index of each age bin; the rate is constant within a bin."""
    chances = [1 - exp(-rate * width) for rate, width in zip(rates, _WIDTHS, strict=True)]
    spent = [chance / rate for chance, rate in zip(chances, rates, strict=True)]
    found: list[float] = []
    for place in range(BINS):
        best, alive, gain, cost = 0.0, 1.0, 0.0, 0.0
        for chance, time in zip(chances[place:], spent[place:], strict=True):
            gain += alive * chance
            cost += alive * time
            best = max(best, gain / cost)
            alive *= 1 - chance
        found.append(best)
    return tuple(found)


def turn_level(prompts: int) -> int:
    """Return the level of sessions with this many prompts: their number below SINGLE_TURNS, then its logarithm.

    Sessions of one kind often end after a similar number of prompts, so each number has rates of its own."""
    if prompts < SINGLE_TURNS:
        return prompts
    return min(MAX_TURN_LEVEL, SINGLE_TURNS + prompts.bit_length() - SINGLE_TURNS.bit_length())


class ReturnClasses:
    """Return rates by class: tenant, kind of chain, and a level (of turns, or of sessions that share a block).

    A class that has seen little follows the class of all tenants with that kind and level, and this one the kind. A
    class with a group follows the same class without one. max_classes: classes kept; a tenant whose class was dropped
    begins again."""

    def __init__(self, max_classes: int) -> None:
        self._max_classes = max_classes
        self._kinds: dict[str, ReturnRates] = {}
        self._levels: dict[tuple[str, int], ReturnRates] = {}
        self._classes: OrderedDict[tuple[str, str, int, int], ReturnRates] = OrderedDict()

    def find(self, tenant: str, kind: str, level: int, group: int = 0, *, alike: bool = False) -> ReturnRates:
        """Return the rates of a class. group: from 1 on, a part of it. alike: returns take as long on all levels."""
        key = tenant, kind, level, group
        found = self._classes.get(key)
        if found is None:
            wider = self.find(tenant, kind, level) if group else self._wider(kind, level, alike)
            found = self._classes[key] = ReturnRates(wider, PRIOR_ALIKE if alike else PRIOR_BIN)
            if len(self._classes) > self._max_classes:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return found

    def _wider(self, kind: str, level: int, alike: bool) -> ReturnRates:
        """Return the rates of all tenants' chains of this kind and level."""
        if (found := self._levels.get((kind, level))) is None:
            wider = self._kinds.setdefault(kind, ReturnRates())
            found = self._levels[kind, level] = ReturnRates(wider, PRIOR_ALIKE if alike else PRIOR_BIN)
        return found
