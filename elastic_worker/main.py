"""Entry point of `kvferry prefill --elastic` and `kvferry decode --elastic`."""

from __future__ import annotations

from kvferry.elastic_worker.service import ElasticService
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.serve import serve_node


async def serve_elastic(settings: WorkerSettings) -> None:
    """Run a node, at first in the role of its settings, until SIGTERM or SIGINT.

    Raises ConfigError when it cannot start."""
    await serve_node(settings, ElasticService)
