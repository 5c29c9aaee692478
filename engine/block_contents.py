"""Token ids of a pool's findable blocks by hash, kept only if the node publishes KV events (worker/kv_events)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.media import media_in
from kvferry.protocol.messages import Job


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Tokens of one full block, and what its hash covers besides.

    parent: hash of the block before it; None: a chain's first. namespace, adapter: see `Job`. media: hash of each
    medium in it, and its first token's place relative to the block's."""

    parent: bytes | None
    token_ids: tuple[int, ...]
    namespace: str
    adapter: str
    media: tuple[tuple[str, int], ...] = ()


class BlockContents:
    """Contents by hash of a pool's findable blocks.

    A block that arrived with its hash alone is unknown until a request computes a block after it. Each known block's
    parent is known. The engine thread writes; `get` and `hashes` may be called from any thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, BlockContent] = {}

    def note(self, job: Job, token_ids: Sequence[int], hashes: Sequence[bytes], block_size: int) -> None:
        """Record a chain of findable blocks: `hashes` are those of the first blocks of `token_ids`."""
        first = len(hashes)
        while first and hashes[first - 1] not in self._known:
            first -= 1
        for index in range(first, len(hashes)):
            tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
            parent = hashes[index - 1] if index else None
            media = tuple(media_in(job.media, index * block_size, block_size)) if job.media else ()
            self._known[hashes[index]] = BlockContent(parent, tokens, job.namespace, job.adapter, media)

    def forget(self, block_hash: bytes) -> None:
        """Drop a block that can no longer be found."""
        self._known.pop(block_hash, None)

    def get(self, block_hash: bytes) -> BlockContent | None:
        """Return the content of a block; None if it is unknown or gone."""
        return self._known.get(block_hash)

    def hashes(self) -> list[bytes]:
        """Return the hashes of all known blocks. The copy is one bytecode."""
        return list(self._known)
