"""Entry point of `kvferry prefill`."""

from __future__ import annotations

from kvferry.prefill_worker.service import PrefillService
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.serve import serve_node


async def serve_prefill(settings: WorkerSettings) -> None:
    """Run a prefill node until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    await serve_node(settings, PrefillService)
