"""What tests of files and batches stand on: an API that keeps them in a folder, and what is left there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.api_parts import Api, FakeCluster, says

CHAT = "/v1/chat/completions"


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


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def rows(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    made = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, made)).encode()


async def upload(at: Api, content: bytes, **fields: Any) -> httpx.Response:
    return await at.http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch", **fields})


async def begin(at: Api, content: bytes, endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
    file_id = (await upload(at, content)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
    answer = await at.http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def output(at: Api, file_id: str) -> list[dict[str, Any]]:
    text = (await at.http.get(f"/v1/files/{file_id}/content")).text
    return sorted(map(json.loads, text.splitlines()), key=lambda row: row["custom_id"])
