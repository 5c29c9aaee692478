"""Chained block hashes of token sequences, computed identically in router and engine."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

HASH_BYTES = 16
"""Bytes of a block hash: the first 128 bits of a SHA-256."""
NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})
"""Extras of blocks that hold nothing but tokens."""


def namespace(tenant: str, salt: str) -> str:
    """Return the namespace that roots block hashes in addition to the model."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def salt_of(namespace: str) -> str:
    """Return the salt of a namespace without a tenant; the whole namespace of a tenant."""
    return namespace.removeprefix("0:")


@lru_cache(maxsize=1024)
def root_hash(fingerprint: str, namespace: str = "", adapter: str = "") -> bytes:
    """Return the parent hash of a sequence's first block.

    It covers model revision, KV layout, the tenant's namespace, and the adapter's id if there is one."""
    root = hashlib.sha256(b"kvferry-root\0" + fingerprint.encode() + b"\0" + namespace.encode()).digest()
    if adapter:
        root = hashlib.sha256(b"kvferry-adapter\0" + root + adapter.encode()).digest()
    return root[:HASH_BYTES]


def block_hash(parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> bytes:
    """Return 128 bits of SHA-256 over (parent, token ids as little-endian int32, tagged extras)."""
    (found,) = _hashes(parent, token_ids, len(token_ids), {0: extras})
    return found


def chain(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[bytes] = (),
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> list[bytes]:
    """Return the hashes of all full blocks of `token_ids`, in order.

    known: hashes of the first blocks, if computed already. extras: of blocks by their number, see `block_hash`."""
    hashed = len(known) * block_size
    tail = token_ids[hashed:] if hashed else token_ids
    return [*known, *_hashes(known[-1] if known else root, tail, block_size, extras, len(known))]


def _hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, extras: Mapping[int, bytes], first: int = 0
) -> Iterator[bytes]:
    """Yield one hash for each full block, of which the first has number `first`.

    A long prompt has thousands of blocks and requests wait for the hashes, so all tokens become bytes at once."""
    tokens = array("i", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    data, size = tokens.tobytes(), block_size * tokens.itemsize
    for number, start in enumerate(range(0, len(data) - size + 1, size), first):
        hashed = parent + data[start : start + size]
        if extras and (own := extras.get(number)):
            hashed += b"\0extras\0" + own
        parent = hashlib.sha256(hashed).digest()[:HASH_BYTES]
        yield parent


def state_hashes(block: bytes, count: int) -> list[bytes]:
    """Return the hashes of the `count` blocks that hold a model's recurrent state at the end of a block.

    block: the hash of that block, which covers everything that the state has seen. Each is computed by itself, so the
    last one, with which a checkpoint is whole, costs one SHA-256."""
    return [state_hash(block, number) for number in range(count)]


def embedding_hashes(root: bytes, item: str, count: int) -> list[bytes]:
    """Return the hashes of the `count` blocks that hold the rows of one image, audio or video.

    root: see `root_hash`, so that no tenant learns what others have sent. item: the engine's name of the content."""
    found = [hashlib.sha256(b"kvferry-embedding\0" + root + item.encode()).digest()[:HASH_BYTES]]
    while len(found) < count:
        found.append(hashlib.sha256(b"kvferry-embedding\0" + found[-1]).digest()[:HASH_BYTES])
    return found[:count]


def state_hash(block: bytes, number: int) -> bytes:
    """Return the hash of one of the blocks of a recurrent state: see `state_hashes`."""
    return hashlib.sha256(b"kvferry-state\0" + block + number.to_bytes(4, "little")).digest()[:HASH_BYTES]
