"""MediaCache: a simulated node's LRU cache of embeddings of images and audio, bounded in tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvferry.simulate.trace_request import Medium


class MediaCache:
    """LRU cache as engine/media/embedding_cache.py. most: largest number of tokens; 0: it keeps none."""

    def __init__(self, most: int) -> None:
        self._most, self._tokens = most, 0
        self._kept: OrderedDict[str, int] = OrderedDict()

    def missing(self, items: Iterable[Medium]) -> int:
        """Return the tokens of media that are not here."""
        return sum(item.length for item in items if item.name not in self._kept)

    def keep(self, items: Iterable[Medium]) -> None:
        """Keep these media as the latest used, unless one alone exceeds the bound."""
        for item in items:
            if item.length <= self._most:
                self._tokens += item.length - self._kept.pop(item.name, 0)
                self._kept[item.name] = item.length
        while self._tokens > self._most:
            self._tokens -= self._kept.popitem(last=False)[1]
