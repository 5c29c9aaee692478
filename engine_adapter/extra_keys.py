"""Reading of what else than tokens the hashes of an engine's blocks cover: adapter, salt and media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvferry.engine_adapter.kv_event_batch import BlocksStored
from kvferry.protocol.hashing import NO_EXTRAS
from kvferry.protocol.media import extras_of


class ExtraKeys(NamedTuple):
    """What the hashes of consecutive blocks cover.

    salt    of the chain; empty: none, or not told by these blocks
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
    for at, told in enumerate(event.extra_keys[: len(event.keys)]):
        keys = told or []
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
