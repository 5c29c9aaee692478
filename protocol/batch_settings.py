"""Settings of routers about clients' files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.protocol.media_settings import MediaSettings
from kvferry.protocol.setting import setting


@dataclass(frozen=True, kw_only=True)
class BatchSettings(MediaSettings):
    """Settings of a router about files and batches."""

    files_store: str = setting(
        "disk",
        "where clients' files and batches are; disk: in --data-dir, which several routers may share; redis: in the "
        "cluster's Redis, so that any router of the cluster has them",
        choices=("disk", "redis"),
    )
    files_ttl: float = setting(
        2_592_000.0,
        "seconds for which Redis keeps a file or batch (30 days); a disk keeps them until deleted",
        min=60,
    )
    data_dir: str = setting(
        "~/.local/state/kvferry",
        "directory of clients' files and batches and of the last known nodes, with a subdirectory per --cluster",
    )
    files_mib: int = setting(1024, "MiB of stored files per tenant, and of one upload", min=1)
    batch_rows: int = setting(
        16, "requests of batches in progress; one fewer for each live request, but at least one", min=1
    )

    @property
    def data_folder(self) -> Path:
        """Return the directory of this cluster's data."""
        return Path(self.data_dir).expanduser() / self.cluster
