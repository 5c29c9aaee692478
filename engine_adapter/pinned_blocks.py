"""Blocks that a prefill engine keeps for decode engines which have not fetched them yet."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable


class PinnedBlocks:
    """Prompts whose blocks an engine keeps until they are fetched, or for `lease_s` seconds.

    Nobody can give them back: an attempt that is cancelled behind its prefill keeps its blocks as long as the lease."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self._clock, self._numbers = lease_s, clock, itertools.count()
        self._held: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def pin(self, blocks: int) -> int:
        """Note blocks that are kept from now on; return a number by which to release them."""
        number = next(self._numbers)
        self._held[number] = (self._clock() + self._lease_s, blocks)
        return number

    def fetched(self, number: int) -> None:
        """Note that blocks were fetched."""
        self._held.pop(number, None)

    @property
    def prompts(self) -> int:
        """Return the number of prompts that are kept."""
        self._expire()
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Return the number of blocks that are kept."""
        self._expire()
        return sum(blocks for _, blocks in self._held.values())

    def _expire(self) -> None:
        now = self._clock()
        while self._held and next(iter(self._held.values()))[0] <= now:
            self._held.popitem(last=False)
