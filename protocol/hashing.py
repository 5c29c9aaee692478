"""Chained block hashes. Router and engine compute them with the same function, so the index needs no translation."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def root_hash(fingerprint: str, namespace: str = "", adapter: str = "") -> bytes:
    """Parent of a sequence's first block: covers model revision, KV layout, the tenant's namespace, and the id of the
    adapter, if there is one."""
    root = hashlib.sha256(b"kvferry-root\0" + fingerprint.encode() + b"\0" + namespace.encode()).digest()
    if adapter:
        root = hashlib.sha256(b"kvferry-adapter\0" + root + adapter.encode()).digest()
    return root[:HASH_BYTES]


def block_hash(parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> bytes:
    """128 bits of SHA-256 over (parent, token ids as little-endian int32, tagged extras)."""
    tokens = array("i", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    digest = hashlib.sha256(parent)
    digest.update(tokens.tobytes())
    if extras:
        digest.update(b"\0extras\0" + extras)
    return digest.digest()[:HASH_BYTES]


def chain(
    root: bytes, token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = (), extras: bytes = b""
) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order; `known` are those of its first blocks, already computed."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], extras)
        hashes.append(parent)
    return hashes
