"""The slower memories of a node, as its settings want them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kv_transfer.tiers.disk import DiskTier, open_disk
from kv_transfer.tiers.objects import Objects
from kv_transfer.tiers.remote import RemoteTier
from node.assembly import Assembled
from protocol.errors import ConfigError
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """disk: of this node alone; remote: of all nodes that compute the same."""

    disk: DiskTier | None = None
    remote: RemoteTier | None = None

    def close(self) -> None:
        """Nothing is begun any more."""
        if self.disk is not None:
            self.disk.close()
        if self.remote is not None:
            self.remote.close()


def open_tiers(settings: WorkerSettings, parts: Assembled) -> OpenTiers:
    """Raises ConfigError. It may take as long as reading the headers of all files."""
    for name in ("kv_disk_path", "kv_remote_url"):
        if getattr(settings, name):
            _require_cached(settings, parts, name)
    remote = _open_remote(settings, parts) if settings.kv_remote_url else None
    return OpenTiers(_open_disk(settings, parts) if settings.kv_disk_path else None, remote)


def _require_cached(settings: WorkerSettings, parts: Assembled, name: str) -> None:
    if not settings.enable_prefix_caching or parts.engine.config.limits.whole:
        raise ConfigError("nothing is cached here that could be kept", param=name)
    if parts.kv.device.type != "cpu":
        raise ConfigError(f"{name} keeps blocks of pools on a CPU only, as yet", param=name)


def _open_disk(settings: WorkerSettings, parts: Assembled) -> DiskTier:
    size, began = int(settings.kv_disk_gib * GIB), time.monotonic()
    block_bytes = parts.layout.block_bytes
    tier = open_disk(settings.kv_disk_path, settings.role, size, parts.fingerprint, block_bytes)
    found, took = len(tier.hashes()), time.monotonic() - began
    log.info("%d blocks (%.2f GiB) found in %s in %.1f s", found, tier.used / GIB, tier.directory, took)
    return tier


def _open_remote(settings: WorkerSettings, parts: Assembled) -> RemoteTier:
    """It is not asked for anything yet: a node starts also while the store is away."""
    objects = Objects(settings.kv_remote_url)
    return RemoteTier(objects, int(settings.kv_remote_gib * GIB), parts.fingerprint, parts.layout.block_bytes)
