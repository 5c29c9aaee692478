"""A node as a process: runs until a signal asks it to drain."""

from __future__ import annotations

import os

from node.node import Node
from node.service import MakeService
from process.signals import Stop
from protocol.settings import WorkerSettings


async def serve_node(settings: WorkerSettings, make_service: MakeService) -> None:
    """Run a node until SIGTERM or SIGINT, then drain. Raises ConfigError when it cannot start."""
    stop = Stop()
    stop.listen()
    if not await Node(settings, make_service).run(stop):
        os._exit(0)  # the thread that loads the model cannot be ended otherwise
