"""Block transfer between mock engines, with the dangers of NIXL's pull mode.

An engine reads blocks by their numbers and never checks whose they are. A reference that was used, or whose lease is
over, gives wrong tokens behind status 200; a prompt that needs more blocks than the reference names ends the process.
`dangers` names each time that one of these was asked of this engine."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

FETCH_S = 5.0


@dataclass
class Kept:
    """A prompt whose blocks an engine keeps."""

    tokens: list[int]
    until: float
    fetched: bool = False


@dataclass
class MockTransfer:
    """Transfers of one mock engine. corrupt: "", "first" or "later": which tokens behind fetched blocks are wrong."""

    port: int
    block_size: int
    lease_s: float
    corrupt: str = ""
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kept: dict[str, Kept] = field(default_factory=dict)
    dangers: list[str] = field(default_factory=list)
    fetched: int = 0

    def mount(self, app: FastAPI) -> None:
        @app.get("/mock/blocks/{engine_id}/{name}")
        async def blocks(engine_id: str, name: str) -> dict[str, Any]:
            kept = self.kept.get(name) if engine_id == self.engine_id else None
            if kept is None:
                return {"state": "unknown", "tokens": []}
            state = "consumed" if kept.fetched else "expired" if time.monotonic() > kept.until else "good"
            kept.fetched = True
            return {"state": state, "tokens": kept.tokens}

    @property
    def pinned_blocks(self) -> int:
        now = time.monotonic()
        return sum(self._blocks(each.tokens) for each in self.kept.values() if not each.fetched and each.until > now)

    def keep(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Keep a prompt's blocks; returns the reference."""
        self.kept[name] = Kept(tokens, time.monotonic() + self.lease_s)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.engine_id,
            "remote_block_ids": [list(range(self._blocks(tokens)))], "remote_request_id": name,
            "remote_host": "127.0.0.1", "remote_port": self.port, "tp_size": 1, "remote_num_tokens": len(tokens),
            "transfer_mode": "pull",
        }  # fmt: skip

    async def fetch(self, reference: dict[str, Any], tokens: list[int]) -> str:
        """Fetch a prompt's blocks; returns which tokens are wrong: "", "first", "later"; "computed": no blocks came."""
        if self._blocks(tokens) > len(reference["remote_block_ids"][0]):
            os._exit(86)
        url = "http://{remote_host}:{remote_port}/mock/blocks/{remote_engine_id}/{remote_request_id}"
        try:
            async with httpx.AsyncClient(timeout=FETCH_S) as client:
                told = (await client.get(url.format(**reference))).json()
        except httpx.HTTPError:
            await asyncio.sleep(0.05)
            return "computed"
        if told["state"] == "unknown":
            return "computed"
        self.fetched += 1
        if told["state"] != "good" or told["tokens"] != tokens:
            self.dangers.append(told["state"] if told["state"] != "good" else "of other tokens")
            return "later" if told["state"] == "consumed" else "first"
        return self.corrupt

    def _blocks(self, tokens: list[int]) -> int:
        return -(-len(tokens) // self.block_size)
