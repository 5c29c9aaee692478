"""EmbeddingBlocks: stores embeddings of media in blocks of the KV pool, so that they are cached, fetched and evicted.

The rows of one image, audio or video take a run of blocks with hashes of their own (`protocol.hashing`): the first has
no parent, each other one is a child of the one before. A run is usable only if all of it is in the pool."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.protocol.hashing import embedding_hashes
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.media import MediaItem

_OWNER: Hashable = ("embeddings",)
"""Owner of the holds on a run, which last no longer than a call."""


class EmbeddingBlocks:
    """Runs of blocks with rows of media, in one engine's pool. Owned by the engine thread, but for `hashes`.

    kv: the block pool [block, ...], whose blocks are contiguous. width, dtype: of the rows."""

    def __init__(self, pool: BlockPool, kv: torch.Tensor, width: int, dtype: torch.dtype) -> None:
        self._pool, self._width, self._dtype = pool, width, dtype
        self._blocks = kv.view(torch.uint8).flatten(1)
        self.row_bytes = width * dtype.itemsize

    def hashes(self, root: bytes, item: MediaItem) -> list[bytes]:
        """Return the hashes of the run of a medium. root: that of the request's blocks."""
        return embedding_hashes(root, item.hash, blocks_for(item.length * self.row_bytes, self._blocks.shape[1]))

    def touch(self, hashes: Sequence[bytes]) -> bool:
        """Return whether the whole run is here; it counts as used then."""
        here = self._pool.match(hashes)
        if len(here) < len(hashes):
            return False
        self._pool.acquire(_OWNER, REQUEST, here, 0)
        self._pool.release(_OWNER, REQUEST, here)
        return True

    @torch.inference_mode()
    def load(self, hashes: Sequence[bytes], length: int) -> torch.Tensor | None:
        """Return a copy of the rows [length, width] in a run; None unless the whole run is here."""
        if not self.touch(hashes):
            return None
        found = self._blocks[self._pool.match(hashes)].view(-1)[: length * self.row_bytes]
        return found.view(self._dtype).view(length, self._width)

    @torch.inference_mode()
    def store(self, hashes: Sequence[bytes], rows: torch.Tensor) -> bool:
        """Copy rows [length, width] into a run; return False if the pool has no room for it.

        On return the link may read the blocks."""
        here = self._pool.match(hashes)
        taken = self._pool.acquire(_OWNER, REQUEST, here, len(hashes) - len(here))
        if taken is None:
            return False
        pieces = torch.split(rows.contiguous().view(torch.uint8).view(-1), self._blocks.shape[1])
        for place in range(len(here), len(hashes)):
            block, piece = self._blocks[taken[place]], pieces[place]
            block[: len(piece)].copy_(piece)
            block[len(piece) :].zero_()
        if self._blocks.is_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()
        for place in range(len(here), len(hashes)):
            parent = taken[place - 1] if place else None
            taken[place] = self._pool.register([(_OWNER, REQUEST)], taken[place], hashes[place], parent, tiers=False)
        self._pool.release(_OWNER, REQUEST, taken)
        return True
