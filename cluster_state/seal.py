"""Authentication of the cluster's records in Redis: HMAC-SHA256 (RFC 2104) under keys of the cluster secret.

A client that can write to Redis but does not know the secret can then only delete and repeat."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

_MAC_BYTES = 32
_SEALED = b"\x01"
"""First byte of a sealed record; records are JSON and never begin with it."""


def _no_keys() -> Sequence[bytes]:
    return ()


class Seal:
    """Signer and verifier of records.

    keys: returns the accepted keys; the first one signs. Without a key nothing is signed and everything passes."""

    def __init__(self, keys: Callable[[], Sequence[bytes]] = _no_keys) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys())

    def mac(self, signed: bytes) -> bytes:
        """Return the MAC of the bytes; empty without a key."""
        keys = self._keys()
        return _mac(keys[0], signed) if keys else b""

    def verifies(self, signed: bytes, mac: bytes) -> bool:
        """Return whether the MAC matches the bytes under any accepted key; always true without a key."""
        keys = self._keys()
        return not keys or any([hmac.compare_digest(_mac(key, signed), mac) for key in keys])

    def wrap(self, name: str, record: bytes) -> bytes:
        """Return the record with its MAC, which also covers the record's name; without a key, as it is."""
        mac = self.mac(_named(name, record))
        return _SEALED + mac + record if mac else record

    def unwrap(self, name: str, wrapped: bytes) -> bytes | None:
        """Return the record with this name; None if no accepted key has sealed it. Without a key, as it is."""
        is_sealed, end = wrapped.startswith(_SEALED), 1 + _MAC_BYTES
        mac, record = (wrapped[1:end], wrapped[end:]) if is_sealed else (b"", wrapped)
        return record if self.verifies(_named(name, record), mac) else None


NO_SEAL = Seal()
"""Signs nothing and accepts everything, as without a cluster secret."""


def _named(name: str, record: bytes) -> bytes:
    return name.encode() + b"\0" + record


def _mac(key: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, signed, hashlib.sha256)
