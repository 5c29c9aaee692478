"""Learned rates at which idle blocks are used again, as a function of the time since their last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp

FIRST_S, GROWTH, BINS = 0.25, 2**0.5, 32
"""End of the first age bin in seconds, ratio of two ends, and number of bins; the last one begins after two hours."""
ENDS = tuple(FIRST_S * GROWTH**place for place in range(BINS - 1))
"""End of each age bin but the last, in seconds."""
_STARTS = (0.0, *ENDS)
_WIDTHS = tuple(end - start for start, end in zip(_STARTS, (*ENDS, 2 * ENDS[-1]), strict=True))
MEMORY = 512.0
"""Chains whose end was seen, after which a class counts the older ones half."""
PRIOR = 2.0
"""Weight of the wider class in the rates of one class, in returned chains."""
PRIOR_S = 10.0
"""Before any observation, blocks of age a return at a rate of 1 / (a + PRIOR_S): recently used ones are worth more."""
NEWS = 0.02
"""Values are computed anew once this share of what a class remembers has changed."""


class ReturnRates:
    """Rates of return of one class of chains, by age.

    Each age bin counts returns, and the time that chains spent in it: chains that were not used again so far count, too
    (occurrence/exposure rates). `parent` is a wider class, whose rates count where this one has seen little. Memory is
    fixed, and old observations fade. Weights are shares of a chain: 1 is a whole one."""

    __slots__ = ("_exposed", "_parent", "_returns", "_seen", "_stale", "_values")

    def __init__(self, parent: ReturnRates | None = None) -> None:
        self._parent = parent
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

    def rate(self, place: int) -> float:
        """Return the returns per second of a chain whose age is in this bin."""
        before = 1 / (_STARTS[place] + PRIOR_S) if self._parent is None else self._parent.rate(place)
        return (self._returns[place] + PRIOR) / (self._exposed[place] + PRIOR / before)

    def values(self) -> Sequence[float]:
        """Return, by age bin, the most returns per second that keeping a block of that age can give.

        That is the highest ratio, over all times to keep it, of the chance that it returns meanwhile to the expected
        time until it returns or is given up (Gittins index). A block that returns in a minute or never is worth more
        just before that minute ends than at its beginning."""
        if not self._values or self._stale > NEWS * (1 + min(self._seen, MEMORY)):
            self._values, self._stale = _indices([self.rate(place) for place in range(BINS)]), 0.0
        return self._values

    def _end(self, weight: float) -> None:
        self._seen += weight
        self._stale += weight
        if self._seen > MEMORY:
            self._seen /= 2
            self._returns = [each / 2 for each in self._returns]
            self._exposed = [each / 2 for each in self._exposed]


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


class ReturnClasses:
    """Return rates by class: tenant, kind of chain, and a level (of turns, or of sessions that share a block).

    The rates of all tenants of one kind and level are those of the wider class. `most`: classes kept; a tenant whose
    class was dropped begins again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all = ReturnRates()
        self._kinds: dict[tuple[str, int], ReturnRates] = {}
        self._classes: OrderedDict[tuple[str, str, int], ReturnRates] = OrderedDict()

    def find(self, tenant: str, kind: str, level: int) -> ReturnRates:
        """Return the rates of a class."""
        found = self._classes.get((tenant, kind, level))
        if found is None:
            wider = self._kinds.setdefault((kind, level), ReturnRates(self._all))
            found = self._classes[tenant, kind, level] = ReturnRates(wider)
            if len(self._classes) > self._most:
                self._classes.popitem(last=False)
        self._classes.move_to_end((tenant, kind, level))
        return found
