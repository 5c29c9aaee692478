"""Main coroutine of a prefill, decode or encode node's process, or of a further host of a node."""

from __future__ import annotations

import logging
import os

from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.signals import StopSignal
from kvferry.worker.hosts.follower import serve_follower
from kvferry.worker.hosts.join_message import require_hosts
from kvferry.worker.node import Ending, Node
from kvferry.worker.service import MakeService


async def serve_node(settings: WorkerSettings, make_service: MakeService) -> None:
    """Run a node until SIGTERM or SIGINT, then drain it; with --node-rank above 0, run that further host of the node.

    If a thread ends or hangs, the process ends with exit status 1. Raises ConfigError when the node cannot start."""
    require_hosts(settings)
    if settings.node_rank:
        return await serve_follower(settings)
    stop = StopSignal()
    stop.listen()
    ending = await Node(settings, make_service, die=lambda: os._exit(1)).run(stop)
    if ending is not Ending.DRAINED:
        logging.shutdown()
        os._exit(1 if ending is Ending.BROKEN else 0)  # remaining threads cannot be ended otherwise
