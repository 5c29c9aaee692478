"""A node as a process: runs until a signal asks it to drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from node.node import Node, Service
from protocol.settings import WorkerSettings


async def serve_node(settings: WorkerSettings, make_service: Callable[[Node], Service]) -> None:
    """Run a node until SIGTERM or SIGINT, then drain. A second signal ends the drain. Raises ConfigError."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await Node(settings, make_service).run(stopping)
