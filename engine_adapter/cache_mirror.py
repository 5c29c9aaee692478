"""CacheMirror: applies an engine's decoded KV events, gives rows by kvferry's hashes, and a prompt's held tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvferry.engine_adapter.cached_blocks import CachedBlocks
from kvferry.engine_adapter.kv_event_batch import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from kvferry.protocol.hashing import NO_EXTRAS, chain, root_hash
from kvferry.protocol.index_rows import behind
from kvferry.protocol.media import MediaItem, block_extras, extras_of
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.adapter")

FULL_ATTENTION = {"", "full_attention", "mla_attention", "sink_full_attention"}
"""Kinds of attention whose blocks are reused from a chain's first block on; empty: not reported."""
DEVICE_MEDIA = {"", "GPU"}
"""Media whose blocks are in the engine's own cache, also on other devices than GPUs."""
MAX_BLOCKS = 1 << 20
"""Maximum number of mirrored blocks if the engine does not report its total."""
MAX_OVERCOUNT = 2
"""Copies per block of the engine at which the count of copies must be wrong; engines report sizes in several ways."""
HELD_SLICE = 64
"""Number of blocks hashed per step while a prompt is compared."""


class CacheMirror:
    """Blocks that the engine is known to cache, and their rows. Belongs to one asyncio loop.

    fingerprint    of the node, see `protocol.hashing.root_hash`
    block_size     tokens per block of the engine
    total_blocks   blocks of the engine; 0: unknown
    adapter_id     returns kvferry's id of a LoRA adapter by the engine's name; None: unknown
    note           called with rows added and rows removed, see `IndexWriter.note`
    counts_copies  see `CachedBlocks`

    Blocks of other groups, media and sizes are skipped, and so are those whose hash covers more than tokens, adapter,
    salt, and images, audio or video. `skipped` counts them by reason, `clears` how often
    all blocks went at once. Nothing that an engine sends raises an error."""

    def __init__(
        self,
        fingerprint: str,
        block_size: int,
        *,
        total_blocks: int = 0,
        adapter_id: Callable[[str], str | None] = lambda name: None,
        note: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda stored, removed: None,
        counts_copies: bool = True,
    ) -> None:
        self._fingerprint, self._block_size, self._adapter_id = fingerprint, block_size, adapter_id
        self._note, self._max_copies = note, (total_blocks or MAX_BLOCKS) * MAX_OVERCOUNT
        self._cached = CachedBlocks(block_size, counts_copies=counts_copies)
        self._warn = RateLimitedLog(log)
        self.stored = self.removed = self.clears = 0
        self.skipped: Counter[str] = Counter()

    @property
    def blocks(self) -> int:
        """Return the number of distinct blocks known."""
        return len(self._cached)

    def rows(self) -> list[bytes]:
        """Return the rows of all blocks that can be reused, parents before children."""
        return list(self._cached.rows)

    def take(self, batch: EventBatch) -> None:
        """Apply a batch of events."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear()
            elif event.group or event.medium not in DEVICE_MEDIA:
                self._skip("group" if event.group else "medium", len(event.keys))
            elif isinstance(event, BlocksRemoved):
                known = sum(map(self._cached.remove, event.keys))
                self.removed += known
                self._skip("unknown", len(event.keys) - known)
            else:
                self._store(event)
        if self._cached.copies > self._max_copies:
            self._warn.warning(
                "the engine announced %d copies of blocks, more than it can have: forgetting its cache's contents",
                self._cached.copies,
            )
            self._clear()
        self._publish()

    def forget(self) -> None:
        """Forget all blocks, because the engine did or because events were lost."""
        self._clear()
        self._publish()

    def held(
        self, token_ids: Sequence[int], namespace: str = "", adapter: str = "", media: Sequence[MediaItem] = ()
    ) -> int:
        """Return how many leading tokens of a prompt the engine can reuse. adapter: kvferry's id of it.

        The last token is always computed, so of a fully cached prompt the last token does not count."""
        size, row, before = self._block_size, b"", root_hash(self._fingerprint, namespace, adapter)
        full, extras = (len(token_ids) - 1) // size, block_extras(media, size)
        for start in range(0, full, HELD_SLICE):
            end = min(full, start + HELD_SLICE)
            own = {number - start: each for number, each in extras.items()} if extras else extras
            hashes = chain(before, token_ids[start * size : end * size], size, extras=own)
            for at, before in enumerate(hashes, start):
                row = behind(row, before)
                if row not in self._cached.rows:
                    return at * size
        return max(0, full) * size

    def _clear(self) -> None:
        self.clears += 1
        self._cached.clear()

    def _store(self, event: BlocksStored) -> None:
        keys, size = event.keys, self._block_size
        if event.kind not in FULL_ATTENTION:
            return self._skip("group", len(keys))
        if event.block_size != size:
            self._warn.warning("the engine stores blocks of %d tokens, not %d", event.block_size, size)
            return self._skip("block_size", len(keys))
        if len(event.token_ids) != len(keys) * size:
            return self._skip("shape", len(keys))
        adapter = self._adapter_id(event.lora) if event.lora else ""
        if adapter is None:
            return self._skip("adapter", len(keys))
        salt, known, extras = read_extra_keys(event)
        if known:
            root = root_hash(self._fingerprint, salt, adapter) if event.parent is None else b""
            self._cached.store(keys[:known], event.parent, event.token_ids[: known * size], root, extras)
        self.stored += known
        return self._skip("extra_keys", len(keys) - known)

    def _skip(self, reason: str, blocks: int) -> None:
        if blocks:
            self.skipped[reason] += blocks

    def _publish(self) -> None:
        added, removed = self._cached.changes()
        if added or removed:
            self._note(added, removed)


class ExtraKeys(NamedTuple):
    """What the hashes of consecutive blocks cover.

    salt    of the chain; empty: none, or not reported with these blocks
    known   number of leading blocks whose hash covers nothing else than the rest of this
    extras  media of blocks, by their place among these, as in kvferry's own hashes
    """

    salt: str
    known: int
    extras: Mapping[int, bytes]


def read_extra_keys(event: BlocksStored) -> ExtraKeys:
    """Return what the blocks' hashes cover, in vLLM's form: the adapter's name, then media, then the chain's salt.

    Media are pairs of a hash and a place; a salt is a text, and only a chain's first block has one."""
    salt, extras = event.salt, dict[int, bytes]()
    for at, reported in enumerate(event.extra_keys[: len(event.keys)]):
        keys = reported or []
        if event.lora and keys and str(keys[0]) == event.lora:
            keys = keys[1:]
        if at == 0 and event.parent is None and keys and isinstance(keys[-1], str):
            salt, keys = keys[-1], keys[:-1]
        if not all(map(_is_media, keys)):
            return ExtraKeys(salt, at, extras)
        if keys:
            extras[at] = extras_of((name, place) for name, place in keys)
    return ExtraKeys(salt, len(event.keys), extras or NO_EXTRAS)


def _is_media(key: Any) -> bool:
    return isinstance(key, list | tuple) and len(key) == 2 and type(key[0]) is str and type(key[1]) is int
