"""Entry point of `kvferry prefill`."""

from __future__ import annotations

from kvferry.node.serve import serve_node
from kvferry.prefill_worker.service import PrefillService
from kvferry.protocol.settings import WorkerSettings


async def serve_prefill(settings: WorkerSettings) -> None:
    """Run a prefill node until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    await serve_node(settings, PrefillService)
