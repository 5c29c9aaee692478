"""Entry point of `kvferry decode`."""

from __future__ import annotations

from kvferry.decode_worker.service import DecodeService
from kvferry.node.serve import serve_node
from kvferry.protocol.settings import WorkerSettings


async def serve_decode(settings: WorkerSettings) -> None:
    """Run a decode node until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    await serve_node(settings, DecodeService)
