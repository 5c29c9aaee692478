"""Encoder of a pool's changes as vLLM's KV events: BlockStored, BlockRemoved and AllBlocksCleared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvferry.engine.block_contents import BlockContent, BlockContents
from kvferry.protocol.hashing import salt_of

MEDIUM = "GPU"
"""Name of an engine's own pool in vLLM's events, even if the pool is in host memory."""
_MASK = 2**64 - 1


class EventEncoder:
    """Encoder of one pool's changes; it remembers which blocks it has announced.

    A block is announced after its parent, and only once its tokens are known (see `BlockContents`).

    adapter_name: returns the name of a LoRA adapter's id."""

    def __init__(self, contents: BlockContents, block_size: int, adapter_name: Callable[[str], str]) -> None:
        self._contents, self._block_size, self._adapter_name = contents, block_size, adapter_name
        self.announced: set[bytes] = set()

    def changed(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> list[dict[str, Any]]:
        """Return the events of blocks that became findable, and of blocks that can no longer be found."""
        gone = [block_hash for block_hash in removed if block_hash in self.announced]
        self.announced.difference_update(gone)
        events: list[dict[str, Any]] = []
        if gone:
            hashes = [short(block_hash) for block_hash in gone]
            events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": 0})
        return [*events, *self._stored(stored)]

    def cleared(self) -> dict[str, Any]:
        """Forget all blocks, and return the event that makes readers do the same."""
        self.announced.clear()
        return {"type": "AllBlocksCleared"}

    def _stored(self, stored: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """Yield one event for each run of consecutive blocks."""
        event: dict[str, Any] | None = None
        last: bytes | None = None
        for block_hash in stored:
            for each, content in self._unannounced(block_hash):
                self.announced.add(each)
                if event is None or content.parent is None or content.parent != last:
                    if event is not None:
                        yield event
                    event = self._begun(content)
                if content.media and "extra_keys" not in event:
                    event["extra_keys"] = [None] * len(event["block_hashes"])
                event["block_hashes"].append(short(each))
                event["token_ids"] += content.token_ids
                if "extra_keys" in event:
                    event["extra_keys"].append(self._extra(content))
                last = each
        if event is not None:
            yield event

    def _unannounced(self, block_hash: bytes) -> list[tuple[bytes, BlockContent]]:
        """Return the block and its unannounced predecessors, first block first; empty if one is unknown."""
        chain: list[tuple[bytes, BlockContent]] = []
        next_hash: bytes | None = block_hash
        while next_hash is not None and next_hash not in self.announced:
            content = self._contents.get(next_hash)
            if content is None:
                return []
            chain.append((next_hash, content))
            next_hash = content.parent
        return chain[::-1]

    def _begun(self, content: BlockContent) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": None if content.parent is None else short(content.parent),
            "token_ids": [],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if content.adapter:
            event["lora_name"] = self._adapter_name(content.adapter)
        if content.namespace or content.adapter:
            event["extra_keys"] = []
        return event

    def _extra(self, content: BlockContent) -> list[Any] | None:
        """Return what a block's hash covers besides tokens: adapter, media, and the salt for a chain's first block."""
        keys: list[Any] = [self._adapter_name(content.adapter)] if content.adapter else []
        keys += content.media
        if content.namespace and content.parent is None:
            keys.append(salt_of(content.namespace))
        return keys or None


def short(block_hash: bytes) -> int:
    """Return a block hash in the form of vLLM's events: the low 64 bits."""
    return int.from_bytes(block_hash, "big") & _MASK
