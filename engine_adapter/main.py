"""Entry point of `kvferry adapt`: runs one engine server as a node of the cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kvferry.engine_adapter.api_key import ApiKey
from kvferry.engine_adapter.engine import ElasticEngine, Engine
from kvferry.engine_adapter.engines.llamacpp import LlamaCppEngine
from kvferry.engine_adapter.engines.openai import OpenaiEngine
from kvferry.engine_adapter.engines.sglang import SglangEngine
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.node import AdapterNode
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import AdapterSettings, EngineSettings
from kvferry.runtime.signals import StopSignal

ENGINES: dict[str, Callable[[EngineHttp], Engine]] = {
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "llamacpp": LlamaCppEngine,
}
"""Clients by the value of --engine; openai is made apart."""


async def serve_adapter(settings: AdapterSettings) -> None:
    """Run an adapter until SIGTERM or SIGINT, or until its engine ends. Raises ConfigError when it cannot start.

    If the engine ends, the process ends with exit status 1 at once, so that routers see a dead node."""
    if settings.role == "prefill" and (settings.engine not in ("vllm", "sglang") or settings.kv_transfer == "none"):
        raise ConfigError("only vLLM's and SGLang's prompts can be computed for another engine", param="role")
    engine = engine_client(settings.engine, settings.url, settings, settings.tokenizer)
    if settings.elastic and not isinstance(engine, ElasticEngine):
        raise ConfigError(
            f"{settings.engine} cannot change between prefill and decode; only SGLang can", param="elastic"
        )
    stop = StopSignal()
    stop.listen()
    if not await AdapterNode(settings, engine).run(stop):
        logging.shutdown()
        os._exit(1)


def engine_client(kind: str, url: str, settings: EngineSettings, tokenizer: str = "") -> Engine:
    """Return the client of an engine server. tokenizer: model whose files hold it, for an OpenAI server; empty: none.

    Raises ConfigError for an unknown kind, an invalid URL and a key that cannot be used."""
    http = EngineHttp(url, ApiKey(settings))
    if kind == "openai":
        return OpenaiEngine(http, settings.engine_model, tokenizer)
    if kind not in ENGINES:
        raise ConfigError(f"no protocol is known for engine {kind}", param="engine")
    return ENGINES[kind](http)
