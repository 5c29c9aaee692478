"""Checks of a Redis or Valkey server before use: cluster mode, sufficient ACL, safe eviction policy, open access."""

from __future__ import annotations

import asyncio
import logging
import re
import stat
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from kvferry.cluster_state import redis_client, redis_url
from kvferry.cluster_state.redis_scripts import CHECK_COMMANDS, COMMANDS
from kvferry.protocol.errors import ConfigError, RegistryRefuses, RegistryUnavailable
from kvferry.runtime.address import is_loopback

log = logging.getLogger("kvferry.redis")

UNSAFE_POLICIES = ("volatile-ttl", "volatile-lru", "volatile-lfu", "volatile-random", "allkeys-random")
"""Eviction policies that may evict leases before block rows: leases are few and have the shortest time to live."""
_NO_DATABASE = re.compile("DB index|SELECT is not allowed")
LOCAL_USERS, EVERY_HOST = "every user of this machine", "every host that reaches it"
"""Clients that can write to a server without credentials."""


class Forbidden(Exception):
    """The server's ACL forbids commands that kvferry needs."""


async def checked(client: redis.Redis, prefix: str, shown: str, limit_s: float) -> str:
    """Check the server and return its name and version.

    prefix: prefix of all keys. Raises ConfigError for an unsuitable server, RegistryRefuses for one that rejects the
    password or whose ACL forbids a command (both may change later), and RegistryUnavailable if it does not answer."""
    try:
        async with asyncio.timeout(limit_s):
            await client.ping()
            info = await _server_info(client)
            if info.get("cluster_enabled"):
                raise ConfigError(f"Redis at {shown}: {redis_client.CLUSTER_MODE}", param="redis_url")
            await _check_commands(client, prefix)
    except (AuthenticationError, NoPermissionError, Forbidden) as error:
        remedy = "docs/redis.md has the rule for its ACL"
        raise RegistryRefuses(f"Redis at {shown} refuses: {redis_client.error_text(error)}; {remedy}") from error
    except ConfigError:
        raise
    except Exception as error:
        message = f"Redis at {shown}: {redis_client.error_text(error)}"
        if redis_client.is_cluster(error) or (isinstance(error, ResponseError) and _NO_DATABASE.search(str(error))):
            raise ConfigError(message, param="redis_url") from error
        raise RegistryUnavailable(message) from error
    policy = str(info.get("maxmemory_policy", ""))
    if info.get("maxmemory") and policy in UNSAFE_POLICIES:
        log.warning("Redis at %s evicts by %s, including leases: set maxmemory-policy to allkeys-lru", shown, policy)
    name = "Valkey" if "valkey_version" in info else "Redis"
    return f"{name} {info.get('valkey_version') or info.get('redis_version') or 'of unknown version'}"


async def writers(url: str, prefix: str, limit_s: float) -> str:
    """Return who can write to the server without credentials, LOCAL_USERS or EVERY_HOST; empty if nobody can.

    prefix: prefix of all keys; nothing is written. Empty, too, if the server does not answer within the limit."""
    place = redis_url.read(url).server
    path = place.get("path")
    if (path and not _world_writable(Path(path))) or not await _accepts_writes(url, prefix, limit_s):
        return ""
    return LOCAL_USERS if path or is_loopback(place.get("host", "")) else EVERY_HOST


async def _accepts_writes(url: str, prefix: str, limit_s: float) -> bool:
    """Return whether the server runs a command that writes, on a key that does not exist."""
    client = redis_client.connected_without_credentials(url, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            await client.persist(f"{prefix}nobody")
        return True
    except Exception:
        return False
    finally:
        await redis_client.close(client)


def _world_writable(socket: Path) -> bool:
    """Return whether every local user may connect: writing to the socket, through each of its folders."""
    try:
        accessible = all(folder.stat().st_mode & stat.S_IXOTH for folder in socket.absolute().parents)
        return accessible and bool(socket.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


async def _server_info(client: redis.Redis) -> dict[str, Any]:
    """Return the server's INFO; empty if its ACL forbids it."""
    try:
        return dict(await client.info())
    except NoPermissionError:
        return {}


async def _check_commands(client: redis.Redis, prefix: str) -> None:
    """Run each command of the scripts, on unused keys.

    Raises Forbidden naming the commands that the server's ACL forbids."""
    loaded = await client.script_load(CHECK_COMMANDS)  # even if already loaded: SCRIPT LOAD may be forbidden
    refused = await client.evalsha(loaded, 1, prefix, *COMMANDS)
    await client.get(f"{prefix}r:rehearsal")
    if refused:
        forbidden = b", ".join(refused).decode(errors="replace").upper()
        raise Forbidden(f"its user lacks permission for {forbidden} on keys {prefix}*")
