"""Model of an engine's prefix cache: physical blocks, copies, LRU eviction, and the KV events that follow."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Media = tuple[str, int, int]
"""Hash, offset and length of an image or sound."""


@dataclass(frozen=True)
class Prefix:
    """All tokens from a chain's start to the end of a block."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""
    media: tuple[Media, ...] = ()

    @property
    def key(self) -> int:
        drawn = hashlib.sha256(repr((self.tokens, self.salt, self.lora, self.media)).encode()).digest()
        return int.from_bytes(drawn[:8], "big")

    def cut(self, end: int) -> Prefix:
        """The first tokens of it, with the media that begin there."""
        return replace(self, tokens=self.tokens[:end], media=tuple(each for each in self.media if each[1] < end))


class ModelCache:
    """`blocks` physical blocks of `block_size` tokens; events wait in `events` until `take`.

    slots: what each physical block caches, the next one to be evicted first."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size, self.events = block_size, list[dict[str, Any]]()
        self.slots: OrderedDict[int, Prefix | None] = OrderedDict.fromkeys(range(blocks))

    def prefixes(
        self, tokens: Sequence[int], salt: str = "", lora: str = "", media: Sequence[Media] = ()
    ) -> list[Prefix]:
        whole = Prefix(tuple(tokens), salt, lora, tuple(media))
        return [whole.cut(end) for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    @property
    def held(self) -> Counter[Prefix]:
        """Copies of each cached block."""
        return Counter(each for each in self.slots.values() if each is not None)

    def reachable(self) -> set[Prefix]:
        """Cached blocks before which all blocks are cached."""
        held, size = self.held, self.block_size
        return {each for each in held if all(each.cut(end) in held for end in range(size, len(each.tokens), size))}

    def run(
        self,
        tokens: Sequence[int],
        salt: str = "",
        lora: str = "",
        media: Sequence[Media] = (),
        *,
        fresh: bool = False,
    ) -> int:
        """Compute a prompt and cache its full blocks; return the tokens reused.

        The last token is always computed. fresh: reuse nothing, as requests that run side by side do."""
        chain, held = self.prefixes(tokens, salt, lora, media), self.held
        usable = 0 if fresh else (len(tokens) - 1) // self.block_size
        reused = next((at for at, each in enumerate(chain[:usable]) if each not in held), usable)
        pinned = [next(slot for slot, there in self.slots.items() if there == each) for each in chain[:reused]]
        for slot in pinned:
            self.slots.move_to_end(slot)
        new = chain[reused : reused + len(self.slots) - len(pinned)]
        taken = list(self.slots)[: len(new)]
        for slot in taken:
            self.evict(slot)
        for slot, prefix in zip(taken, new, strict=True):
            self.slots[slot] = prefix
        for slot in reversed([*pinned, *taken]):  # The end of a chain is evicted before its start.
            self.slots.move_to_end(slot)
        if new:
            self.events.append(self._stored(new))
        return reused * self.block_size

    def evict(self, slot: int) -> None:
        """Forget what a physical block caches."""
        prefix, self.slots[slot] = self.slots[slot], None
        if prefix is not None:
            removed = {"type": "BlockRemoved", "block_hashes": [prefix.key], "medium": "GPU", "group_idx": 0}
            self.events.append(removed)

    def reset(self) -> None:
        self.slots = OrderedDict.fromkeys(self.slots)
        self.events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def _stored(self, new: list[Prefix]) -> dict[str, Any]:
        size, first = self.block_size, new[0]
        begins = len(first.tokens) == size
        before = first.cut(len(first.tokens) - size)
        return {
            "type": "BlockStored",
            "block_hashes": [each.key for each in new],
            "parent_block_hash": None if begins else before.key,
            "token_ids": list(new[-1].tokens[len(first.tokens) - size :]),
            "block_size": size,
            "lora_id": 1 if first.lora else None,
            "medium": "GPU",
            "lora_name": first.lora or None,
            "extra_keys": [self._extra_keys(each) for each in new],
            "group_idx": 0,
        }

    def _extra_keys(self, prefix: Prefix) -> list[Any] | None:
        """What else the last block's hash covers, in vLLM's order."""
        end = len(prefix.tokens)
        start = end - self.block_size
        media = [[name, at - start] for name, at, length in prefix.media if at < end and at + length > start]
        lora, salt = [prefix.lora] if prefix.lora else [], [prefix.salt] if prefix.salt and not start else []
        return [*lora, *media, *salt] or None
