"""Checks of a Redis or Valkey server before use: a single server, a sufficient ACL and a safe eviction policy."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import redis.asyncio as redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from kvferry.cluster_state import redis_client
from kvferry.cluster_state.redis_scripts import COMMANDS, REHEARSAL
from kvferry.protocol.errors import ConfigError, RegistryRefuses, RegistryUnavailable

log = logging.getLogger("kvferry.redis")

UNFIT_POLICIES = ("volatile-ttl", "volatile-lru", "volatile-lfu", "volatile-random", "allkeys-random")
"""Eviction policies that may evict leases before block rows: leases are few and have the shortest time to live."""
_NO_DATABASE = re.compile("DB index|SELECT is not allowed")


class Forbidden(Exception):
    """The server's ACL forbids commands that kvferry needs."""


async def checked(client: redis.Redis, prefix: str, shown: str, limit_s: float) -> str:
    """Check the server and return its name and version.

    prefix: of all keys. Raises ConfigError for an unsuitable server, RegistryRefuses for one that rejects the password
    or whose ACL forbids a command (both may change later), and RegistryUnavailable if no answer comes yet."""
    try:
        async with asyncio.timeout(limit_s):
            await client.ping()
            facts = await _facts(client)
            if facts.get("cluster_enabled"):
                raise ConfigError(f"Redis at {shown}: {redis_client.CLUSTER_MODE}", param="redis_url")
            await _rehearse(client, prefix)
    except (AuthenticationError, NoPermissionError, Forbidden) as error:
        remedy = "docs/redis.md has the rule for its ACL"
        raise RegistryRefuses(f"Redis at {shown} refuses: {redis_client.told(error)}; {remedy}") from error
    except ConfigError:
        raise
    except Exception as error:
        message = f"Redis at {shown}: {redis_client.told(error)}"
        if redis_client.is_cluster(error) or (isinstance(error, ResponseError) and _NO_DATABASE.search(str(error))):
            raise ConfigError(message, param="redis_url") from error
        raise RegistryUnavailable(message) from error
    policy = str(facts.get("maxmemory_policy", ""))
    if facts.get("maxmemory") and policy in UNFIT_POLICIES:
        log.warning("Redis at %s evicts by %s, including leases: set maxmemory-policy to allkeys-lru", shown, policy)
    name = "Valkey" if "valkey_version" in facts else "Redis"
    return f"{name} {facts.get('valkey_version') or facts.get('redis_version') or 'of unknown version'}"


async def _facts(client: redis.Redis) -> dict[str, Any]:
    """Return the server's INFO; empty if its ACL forbids it."""
    try:
        return dict(await client.info())
    except NoPermissionError:
        return {}


async def _rehearse(client: redis.Redis, prefix: str) -> None:
    """Run each command of the scripts, on unused keys.

    Raises Forbidden naming those that the server's ACL forbids."""
    loaded = await client.script_load(REHEARSAL)  # even if already loaded: SCRIPT LOAD may be forbidden
    refused = await client.evalsha(loaded, 1, prefix, *COMMANDS)
    await client.get(f"{prefix}r:rehearsal")
    if refused:
        told = b", ".join(refused).decode(errors="replace").upper()
        raise Forbidden(f"its user lacks permission for {told} on keys {prefix}*")
