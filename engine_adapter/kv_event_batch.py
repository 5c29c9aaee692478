"""Decoder of the KV events that an engine publishes: msgpack of `[time, [events], data-parallel rank]`.

vLLM and SGLang send each event as a map with its type; older versions sent an array that begins with the type."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgpack

BlockKey = int | bytes
"""An engine's own hash of a block. Nothing is read from it: it is a name."""
_KEYS, _LISTS = {int, bytes}, {list, type(None)}
_ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one chain that the engine stored.

    parent      key of the block before them; None: they begin a chain
    token_ids   tokens of all of them, in order
    block_size  tokens per block
    lora        name of a LoRA adapter; empty: none
    extra_keys  what else the hash of each block covers, in vLLM's form; may be shorter than `keys`
    salt        salt of the chain, as a field of the event (SGLang)
    group, kind, medium  cache group, kind of its attention, and where the blocks are; empty: not reported"""

    keys: list[BlockKey]
    parent: BlockKey | None
    token_ids: array[int]
    block_size: int
    lora: str = ""
    extra_keys: list[list[Any] | None] = field(default_factory=list)
    salt: str = ""
    group: int = 0
    kind: str = ""
    medium: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that the engine evicted, one copy of each."""

    keys: list[BlockKey]
    group: int = 0
    medium: str = ""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine forgot all blocks."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one engine step, in order.

    sent_at    Unix time at the engine
    unknown    events of types that this reader does not know
    malformed  stored blocks that could not be read"""

    sent_at: float
    events: list[KvEvent]
    unknown: int = 0
    malformed: int = 0


class MalformedBatch(ValueError):
    """A batch that cannot be read, and that may have removed blocks."""


def decode(payload: bytes) -> EventBatch:
    """Return the events of a payload. Raises MalformedBatch.

    Stored blocks that cannot be read are skipped and counted: missing them does no harm."""
    try:
        sent_at, events, *_ = msgpack.unpackb(payload, strict_map_key=False)
        if not isinstance(events, list):
            raise TypeError("events are not a list")
        batch, unknown, malformed = list[KvEvent](), 0, 0
        for event in events:
            kind, fields = _named(event)
            if kind == "BlockStored":
                try:
                    batch.append(_stored(fields))
                except (TypeError, ValueError, OverflowError, KeyError):
                    malformed += 1
            elif kind == "BlockRemoved":
                batch.append(BlocksRemoved(_keys(fields["block_hashes"]), *_place(fields)))
            elif kind == "AllBlocksCleared":
                batch.append(AllBlocksCleared())
            else:
                unknown += 1
        return EventBatch(float(sent_at), batch, unknown, malformed)
    except (TypeError, ValueError, OverflowError, KeyError, msgpack.UnpackException) as error:
        raise MalformedBatch(f"{type(error).__name__}: {error}"[:200]) from error


def _named(event: Any) -> tuple[Any, dict[str, Any]]:
    """Return an event's type and its fields by name."""
    if isinstance(event, dict):
        return event.get("type"), event
    kind = event[0] if isinstance(event, list) and event else None
    names = _ARRAY_FIELDS.get(kind, ()) if isinstance(kind, str) else ()
    return kind, dict(zip(names, event[1:], strict=False)) if names else {}


def _stored(fields: dict[str, Any]) -> BlocksStored:
    keys, parent, tokens = _keys(fields["block_hashes"]), fields.get("parent_block_hash"), fields["token_ids"]
    extra_keys, block_size = fields.get("extra_keys") or [], fields["block_size"]
    if not (parent is None or type(parent) in _KEYS) or not isinstance(tokens, list):
        raise TypeError("parent_block_hash or token_ids")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError("block_size")
    if not isinstance(extra_keys, list) or not _LISTS.issuperset(map(type, extra_keys)):
        raise TypeError("extra_keys")
    lora = fields.get("lora_name")
    if lora is None and fields.get("lora_id") is not None:
        lora = str(fields["lora_id"])
    salt, kind = _text(fields.get("cache_salt")), _text(fields.get("kv_cache_spec_kind"))
    group, medium = _place(fields)
    return BlocksStored(
        keys,
        parent,
        array("i", tokens),
        block_size,
        _text(lora),
        extra_keys,
        salt,
        kind=kind,
        group=group,
        medium=medium,
    )


def _keys(keys: Any) -> list[BlockKey]:
    if not isinstance(keys, list) or not _KEYS.issuperset(map(type, keys)):
        raise TypeError("block_hashes")
    return keys


def _place(fields: dict[str, Any]) -> tuple[int, str]:
    group = fields.get("group_idx") or 0
    if not isinstance(group, int):
        raise TypeError("group_idx")
    return group, _text(fields.get("medium"))


def _text(found: Any) -> str:
    if not (found is None or isinstance(found, str)):
        raise TypeError("a text field")
    return found or ""
