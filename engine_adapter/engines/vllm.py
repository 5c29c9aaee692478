"""Client of vLLM's token interface (`--enable-scale-out`), as of vLLM 0.32."""

from __future__ import annotations

import base64
import binascii
import json
import logging
from array import array
from collections.abc import Callable
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts, EngineLoad, KvEventSource, Prefilled
from kvferry.engine_adapter.engine_errors import failure
from kvferry.engine_adapter.engines import vllm_params
from kvferry.engine_adapter.engines.addresses import reachable
from kvferry.engine_adapter.engines.vllm_bad_words import BadWordTexts
from kvferry.engine_adapter.engines.vllm_media import VllmMedia, with_features
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.pooling_engine import PoolingCall, PoolingTask
from kvferry.engine_adapter.prometheus_text import labels, value
from kvferry.protocol.errors import ConfigError, StepFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.work import floats

log = logging.getLogger("kvferry.adapter")

GENERATE = "/inference/v1/generate"
NIXL_METRICS = "vllm:nixl_"
"""Start of the names of metrics that only a server with a NixlConnector has."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens per block of a server that does not report it."""


class VllmEngine:
    """Client of one vLLM server. Implements `engine.TransferEngine`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._model = ""
        self.media = VllmMedia(http, lambda: self._model)
        self.pooling = VllmPooling(http, lambda: self._model)
        self._bad_words = BadWordTexts(http, lambda: self._model)

    async def facts(self) -> EngineFacts:
        """Return the server's version, models, cache layout and where it publishes KV events."""
        version = (await self._http.get("/version"))["version"]
        models = (await self._http.get("/v1/models"))["data"]
        metrics = await self._http.text("/metrics")
        base = [each for each in models if not each.get("parent")]
        if not base:
            raise ConfigError("the engine serves no model")
        self._model = base[0]["id"]
        cache = labels(metrics, "vllm:cache_config_info")
        return EngineFacts(
            kind="vllm",
            version=version,
            process=_process(metrics),
            model=base[0].get("root") or self._model,
            served_names=tuple(each["id"] for each in base),
            max_model_len=int(base[0].get("max_model_len") or 0),
            block_size=_count(cache.get("block_size")) or DEFAULT_BLOCK_SIZE,
            total_blocks=_count(cache.get("num_gpu_blocks")),
            arithmetic=f"cache {cache.get('cache_dtype', '')}",
            adapters=tuple(each["id"] for each in models if each.get("parent")),
            kv_events=await self._event_source(),
            kv_transfer="nixl" if NIXL_METRICS in metrics else "",
        )

    async def health(self) -> None:
        """Return if the server and its engine core are well."""
        await self._http.health()

    async def load(self) -> EngineLoad:
        """Return the numbers of requests and the share of blocks in use, from the server's metrics."""
        metrics = await self._http.text("/metrics")
        return EngineLoad(
            process=_process(metrics),
            running_requests=int(value(metrics, "vllm:num_requests_running")),
            waiting_requests=int(value(metrics, "vllm:num_requests_waiting")),
            cache_usage=value(metrics, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        )

    def check(self, job: Job) -> None:
        """Everything that a job may ask for can be done; of bad_words, `generate` finds out."""

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        """Run a call. The delta with the finish_reason waits for the usage after it, which has the cached tokens."""
        body: Any = vllm_params.body(call, call.adapter or self._model, await self._banned(call))
        if call.media:
            body = await with_features(json.dumps(body).encode(), call.media)
        if call.params.prompt_logprobs is not None:
            deliver(vllm_params.whole(await self._http.post(GENERATE, body, None), call.params))
            return
        last: EngineDelta | None = None

        def event(chunk: dict[str, Any]) -> None:
            nonlocal last
            if (error := chunk.get("error")) is not None:
                raise failure(error)
            for choice in chunk["choices"]:
                delta = vllm_params.delta(choice, call.params)
                if delta.finish_reason is not None:
                    last = delta
                else:
                    deliver(delta)
            if last is not None and (usage := chunk.get("usage")):
                last.cached_tokens = vllm_params.cached_tokens(usage)

        await self._http.stream(GENERATE, body, event)
        if last is None:
            raise StepFailed("the engine's answer ended without a finish reason")
        deliver(last)

    async def prefill(self, call: EngineCall) -> Prefilled:
        """Compute a prompt for another server. vLLM sends the reference only in an answer that is not streamed."""
        body = vllm_params.prefill_body(call, call.adapter or self._model, await self._banned(call))
        answer = await self._http.post(GENERATE, body, None)
        reported = answer.get("kv_transfer_params") or {}
        reference = json.dumps(reported, separators=(",", ":")) if reported.get("do_remote_prefill") else ""
        return Prefilled(vllm_params.whole(answer, call.params), reference)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _banned(self, call: EngineCall) -> tuple[str, ...]:
        return await self._bad_words.of(call.params.bad_words) if call.params.bad_words else ()

    async def _event_source(self) -> KvEventSource | None:
        """Return where the server publishes KV events; None: nowhere, or from several caches that it chooses among."""
        reported = await self._http.get("/kv_event_sources") or {}
        sources = [
            each for each in reported.values() if each.get("enable_kv_cache_events") and each["publisher"] == "zmq"
        ]
        if len(sources) > 1:
            log.warning(
                "the engine has %d data-parallel ranks and chooses one for each prompt: their caches are not mirrored",
                len(sources),
            )
        if len(sources) != 1:
            return None
        (source,), host = sources, self._http.host
        replay = source.get("replay_endpoint") or ""
        return KvEventSource(reachable(source["endpoint"], host), reachable(replay, host), source.get("topic", ""))


def _process(metrics: str) -> str:
    return str(value(metrics, "process_start_time_seconds") or "")


def _count(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


class VllmPooling:
    """Implements `pooling_engine.PoolingEngine`. model: returns the name of the served model."""

    def __init__(self, http: EngineHttp, model: Callable[[], str]) -> None:
        self._http, self._model = http, model

    async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
        """Return the numbers of a prompt as the model's head gives them, without scaling or activation."""
        body: dict[str, Any] = {
            "request_id": call.request_id, "model": call.adapter or self._model(), "task": task,
            "input": call.token_ids, "use_activation": False, "encoding_format": "base64", "embed_dtype": "float32",
            "endianness": "little",
        }  # fmt: skip
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        reported = await self._http.post("/pooling", body, None)
        try:
            return floats(base64.b64decode(reported["data"][0]["data"], validate=True))
        except (TypeError, LookupError, ValueError, binascii.Error) as error:
            raise StepFailed(f"the engine's answer holds no vector: {type(error).__name__}") from error
