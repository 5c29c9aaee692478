"""Construction of a node's KV tiers (host memory, disk, shared store) from settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvferry.kv_transfer.tiers.disk import open_disk
from kvferry.kv_transfer.tiers.host import open_host
from kvferry.kv_transfer.tiers.local import LocalTier
from kvferry.kv_transfer.tiers.object_groups import Known
from kvferry.kv_transfer.tiers.objects import Objects
from kvferry.kv_transfer.tiers.remote import RemoteTier
from kvferry.kv_transfer.tiers.staging import Copies
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.lease import Rates
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.limits import available_memory
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.pool_memory import PoolMemory

log = logging.getLogger("kvferry.worker")

GIB = 1024**3


MARGIN = 0.95
"""Share of the available host memory that blocks may take."""


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """Open KV tiers of a node.

    host, disk: tiers of this node alone, fastest first. remote: shared with all nodes of the same fingerprint. block:
    returns a pool block by its id, in the form that the tiers copy."""

    host: LocalTier[Any] | None = None
    disk: LocalTier[Any] | None = None
    remote: RemoteTier | None = None
    block: Callable[[int], Any] = lambda block_id: block_id

    @property
    def local(self) -> list[LocalTier[Any]]:
        """Return the node's own tiers, fastest first."""
        return [tier for tier in (self.host, self.disk) if tier is not None]

    @property
    def shared(self) -> Known | None:
        """Return the node's record of blocks in the shared store; None without one."""
        return self.remote.known if self.remote else None

    def paced(self, rates: Rates) -> Rates:
        """Return the rates with the recent read time per block of each tier, in seconds."""
        host_s, disk_s, store_s = (tier.block_s if tier else 0.0 for tier in (self.host, self.disk, self.remote))
        return replace(rates, host_block_s=host_s, disk_block_s=disk_s, store_block_s=store_s)

    def close(self) -> None:
        """Stop all tiers; no new reads or writes begin."""
        for tier in self.local:
            tier.close()
        if self.remote is not None:
            self.remote.close()


def open_tiers(settings: WorkerSettings, parts: EngineParts) -> OpenTiers:
    """Open the KV tiers that the settings name. Raises ConfigError.

    Takes as long as reading the headers of all files on disk."""
    for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"):
        if getattr(settings, name):
            _require_cached(settings, parts, name)
    if parts.info.state_floats and settings.kv_remote_url:
        raise ConfigError(
            f"kv_remote_url is not supported for {parts.info.name}, which has recurrent layers: the shared store keeps "
            "whole groups of blocks, and a checkpoint of a state seldom ends with one; use kv_disk_path",
            param="kv_remote_url",
        )
    memory = parts.apart or PoolMemory(parts.kv)
    copies = memory.copies()
    host = _open_host(settings, parts, copies) if settings.kv_host_gib else None
    remote = _open_remote(settings, parts, copies) if settings.kv_remote_url else None
    disk = _open_disk(settings, parts, copies) if settings.kv_disk_path else None
    return OpenTiers(host, disk, remote, memory.block)


def _require_cached(settings: WorkerSettings, parts: EngineParts, name: str) -> None:
    if not settings.enable_prefix_caching or parts.engine.config.limits.whole:
        raise ConfigError("the prefix cache is off", param=name)


def _open_host(settings: WorkerSettings, parts: EngineParts, copies: Copies | None) -> LocalTier[Any]:
    size, available = int(settings.kv_host_gib * GIB), available_memory()
    if copies is None:
        raise ConfigError("the pool itself is in host memory: raise --kv-cache-gib instead", param="kv_host_gib")
    if size > MARGIN * available:
        raise ConfigError(
            f"{size / GIB:.2f} GiB for blocks are more than the {available / GIB:.2f} GiB of host memory left here",
            param="kv_host_gib",
        )
    began = time.monotonic()
    tier = open_host(size, parts.layout.block_bytes, copies)
    log.info("%.2f GiB of host memory for copies of blocks, in %.1f s", size / GIB, time.monotonic() - began)
    return tier


def _open_disk(settings: WorkerSettings, parts: EngineParts, copies: Copies | None) -> LocalTier[Any]:
    size, began = int(settings.kv_disk_gib * GIB), time.monotonic()
    block_bytes = parts.layout.block_bytes
    tier = open_disk(settings.kv_disk_path, settings.role, size, parts.fingerprint, block_bytes, copies)
    found, took = len(tier.hashes()), time.monotonic() - began
    log.info("%d blocks (%.2f GiB) found in %s in %.1f s", found, tier.used / GIB, tier.directory, took)
    return tier


def _open_remote(settings: WorkerSettings, parts: EngineParts, copies: Copies | None) -> RemoteTier:
    """Create the remote tier without contacting the store: a node must start while the store is away."""
    objects, size = Objects(settings.kv_remote_url), int(settings.kv_remote_gib * GIB)
    try:
        return RemoteTier(objects, size, parts.fingerprint, parts.layout.block_bytes, copies)
    except MemoryError as error:
        raise ConfigError("out of host memory for buffers of the remote store", param="kv_remote_url") from error
