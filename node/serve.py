"""A node as a process: runs until a signal asks it to drain."""

from __future__ import annotations

import os
from collections.abc import Callable

from node.node import Node, Service
from process.signals import Stop
from protocol.settings import WorkerSettings


async def serve_node(settings: WorkerSettings, make_service: Callable[[Node], Service]) -> None:
    """Run a node until SIGTERM or SIGINT, then drain. Raises ConfigError when it cannot start."""
    stop = Stop()
    stop.listen()
    node = Node(settings, make_service)
    await node.run(stop)
    if not node.was_ready:
        os._exit(0)  # the thread that loads the model cannot be ended otherwise
