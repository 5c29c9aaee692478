"""LRU cache of media embeddings by content hash, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict

import torch

Key = tuple[bytes, str]
"""Root of the block hashes of a request, and the hash of a medium."""


class EmbeddingCache:
    """Cache of rows. Not thread-safe. max_bytes: bound of all rows; 0: it keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.bytes = max_bytes, 0
        self._rows: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def get(self, key: Key) -> torch.Tensor | None:
        """Return the rows of a medium, which count as used now; None if they are not here."""
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: Key, rows: torch.Tensor) -> None:
        """Keep rows, unless they alone exceed the bound."""
        if key in self._rows or rows.nbytes > self._max_bytes:
            return
        self._rows[key] = rows
        self.bytes += rows.nbytes
        while self.bytes > self._max_bytes:
            _, old = self._rows.popitem(last=False)
            self.bytes -= old.nbytes
