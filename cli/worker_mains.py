"""Chooses the main coroutine of a worker process by its settings, and imports only that code."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from kvferry.model_files.speech_config import transcribes
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.service import MakeService


def worker_main(settings: WorkerSettings) -> Coroutine[Any, Any, None]:
    """Return the main coroutine of a node, which ends with SIGTERM or SIGINT.

    Raises ConfigError if its model is not found; the coroutine raises it when the node cannot start."""
    if settings.role == "decode" and transcribes(settings.model):
        from kvferry.speech_worker.main import serve_speech

        return serve_speech(settings)
    from kvferry.worker.serve import serve_node

    return serve_node(settings, _service(settings))


def _service(settings: WorkerSettings) -> MakeService:
    if settings.role == "encode":
        from kvferry.encode_worker.service import EncodeService

        return EncodeService
    if settings.elastic:
        from kvferry.elastic_worker.service import ElasticService

        return ElasticService
    if settings.role == "decode":
        from kvferry.decode_worker.service import DecodeService

        return DecodeService
    from kvferry.prefill_worker.service import PrefillService

    return PrefillService
