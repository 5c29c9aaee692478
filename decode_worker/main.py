"""Entry point of `kvferry decode`."""

from __future__ import annotations

from kvferry.decode_worker.service import DecodeService
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.serve import serve_node


async def serve_decode(settings: WorkerSettings) -> None:
    """Run a decode node until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    await serve_node(settings, DecodeService)
