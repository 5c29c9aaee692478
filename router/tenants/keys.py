"""Reader and writer of the API key file, which holds only hashes, so that its readers cannot use the keys.

  [acme]
  keys = ["sha256:9f86d081884c7d65..."]
  requests_per_minute = 600

A key has 256 random bits, so its hash cannot be inverted by guessing; a key chosen by a person could be."""

from __future__ import annotations

import hashlib
import math
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvferry.protocol.errors import ConfigError
from kvferry.router.tenants.tenant import NAME, Tenant

KEY_PREFIX = "kvf-"
"""Prefix of generated API keys."""
HASH_PREFIX = "sha256:"
"""Prefix of a key's hash in the file."""
_LIMITS = {field.name for field in fields(Tenant)} - {"name"}
_MOST = 2**31 - 1

Keys = Mapping[bytes, Tenant]
"""Tenants by the SHA-256 of their keys."""


def new_key() -> str:
    """Return a new random API key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: bytes) -> bytes:
    """Return the SHA-256 digest of an API key."""
    return hashlib.sha256(key).digest()


def entry(name: str, key: str) -> str:
    """Return a tenant's lines for the file; raise ConfigError for an invalid name."""
    _check_name(name)
    return f'["{name}"]\nkeys = ["{HASH_PREFIX}{key_hash(key.encode()).hex()}"]\n'


def read_keys(text: str) -> dict[bytes, Tenant]:
    """Parse the text of a keys file; raise ConfigError naming the tenant and the field."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    found: dict[bytes, Tenant] = {}
    for name, table in tables.items():
        _check_name(name)
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: must be a table, [{name}]")
        tenant = Tenant(name, **{field: _number(name, field, table[field]) for field in table.keys() & _LIMITS})
        if unknown := table.keys() - _LIMITS - {"keys"}:
            raise ConfigError(
                f"{name}: unknown field {', '.join(sorted(unknown))}; known are keys, {', '.join(_fields())}"
            )
        for digest in _hashes(name, table.get("keys")):
            if digest in found:
                raise ConfigError(f"{name}: a key of {found[digest].name} is listed twice")
            found[digest] = tenant
    return found


def _fields() -> list[str]:
    return sorted(_LIMITS)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores, not {name!r}")


def _number(name: str, field: str, value: Any) -> Any:
    """Return the limit if it is a number within its bounds; raise ConfigError otherwise."""
    kinds: tuple[type, ...] = (int, float) if field == "share" else (int,)
    least = {"share": 0.001, "priority": -_MOST}.get(field, 0)
    if type(value) not in kinds or not math.isfinite(value) or not least <= value <= _MOST:
        kind = "number" if field == "share" else "whole number"
        raise ConfigError(f"{name}: {field} must be a {kind} of at least {least}, not {value!r}")
    return value


def _hashes(name: str, listed: Any) -> list[bytes]:
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f"{name}: keys must be a list of strings")
    digests = []
    for each in listed:
        digest = each.removeprefix(HASH_PREFIX)
        if digest == each or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigError(f"{name}: a key must be {HASH_PREFIX} and 64 hexadecimal digits; see `kvferry key`")
        digests.append(bytes.fromhex(digest))
    return digests
