"""Main coroutine of a speech node's process: serves until a signal drains the node or until it fails."""

from __future__ import annotations

import logging
import os

from kvferry.model_files.speech_config import require_decoder
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.signals import StopSignal


async def serve_speech(settings: WorkerSettings) -> None:
    """Run a node until SIGTERM or SIGINT. Raises ConfigError when it cannot start.

    If its engine ends or hangs, the process ends with exit status 1, so that routers see a dead node."""
    require_decoder()
    from kvferry.speech_worker.node import SpeechNode

    stop = StopSignal()
    stop.listen()
    if not await SpeechNode(settings, die=lambda: os._exit(1)).run(stop):
        logging.shutdown()
        os._exit(1)
