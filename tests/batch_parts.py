"""What tests of files and batches stand on: an API that keeps them in a folder, and what is left there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.api_parts import Api, FakeCluster, says


def api(tmp_path: Path, cluster: FakeCluster | None = None, **settings: Any) -> Api:
    return Api(cluster or FakeCluster(says("Yes.")), data_dir=str(tmp_path), **settings)


async def ended(at: Api, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch = (await at.http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                return dict(batch)
            await asyncio.sleep(0.02)


def kept(folder: Path, pattern: str) -> list[Path]:
    return list(folder.rglob(pattern))
