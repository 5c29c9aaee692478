"""Client of SGLang's `/generate`, in tokens, as of SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts, EngineLoad, KvEventSource
from kvferry.engine_adapter.engines.addresses import reachable
from kvferry.engine_adapter.engines.listed_vectors import SglangPooling
from kvferry.engine_adapter.engines.sampling import common_sampling
from kvferry.engine_adapter.engines.sglang_roles import switch_role
from kvferry.engine_adapter.engines.sglang_rooms import Rooms
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.prometheus_text import value
from kvferry.protocol.errors import InvalidRequest, KvferryError, Overloaded, StepFailed
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar

GRAMMARS = {"json_schema": "json_schema", "json_object": "json_schema", "regex": "regex", "ebnf": "ebnf",
            "structural_tag": "structural_tag"}  # fmt: skip
"""Kinds of grammars, and SGLang's names for them."""
UNSUPPORTED = ("bad_words", "allowed_token_ids", "prompt_logprobs")
"""Parameters that SGLang's token interface lacks."""


class SglangEngine:
    """Client of one SGLang server. Implements `engine.RoomEngine` and `engine.ElasticEngine`."""

    media = None

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.pooling = SglangPooling(http)
        self._rooms = Rooms({})
        self._aborts: set[asyncio.Task[None]] = set()

    async def facts(self) -> EngineFacts:
        """Return the server's version, model, page size and where it publishes KV events."""
        reported = await self._http.get("/server_info")
        loads = await self._http.get("/v1/models")
        metrics = await self._metrics()
        self._rooms = Rooms(reported)
        page = int(reported.get("page_size") or 1)
        tokens = int(reported.get("max_total_num_tokens") or 0)
        return EngineFacts(
            kind="sglang",
            version=str(reported.get("version", "")),
            process=_process(metrics),
            model=str(reported.get("model_path", "")),
            served_names=tuple(each["id"] for each in loads["data"] if not each.get("parent")),
            max_model_len=int(reported.get("context_length") or loads["data"][0].get("max_model_len") or 0),
            block_size=page,
            total_blocks=tokens // page,
            max_num_seqs=int(reported.get("max_running_requests") or 0),
            arithmetic=f"{reported.get('dtype', '')} cache {reported.get('kv_cache_dtype', '')} "
            f"deterministic {bool(reported.get('enable_deterministic_inference'))}",
            adapters=tuple(each["id"] for each in loads["data"] if each.get("parent")),
            kv_events=event_source(reported.get("kv_events"), self._http.host),
            kv_transfer="rooms" if self._rooms.mode else "",
            kv_role=self._rooms.mode,
        )

    async def health(self) -> None:
        """Return if the server is well."""
        await self._http.health()

    async def load(self) -> EngineLoad:
        """Return the numbers of requests and the share of tokens in use, from the server's metrics."""
        metrics = await self._metrics()
        return EngineLoad(
            process=_process(metrics),
            running_requests=int(value(metrics, "sglang:num_running_reqs")),
            waiting_requests=int(value(metrics, "sglang:num_queue_reqs")),
            cache_usage=min(1.0, value(metrics, "sglang:token_usage")),
        )

    def check(self, job: Job) -> None:
        """Raise InvalidRequest for what SGLang cannot do with tokens alone."""
        for name in UNSUPPORTED:
            if getattr(job.params, name) not in (None, ()):
                raise InvalidRequest(f"{name} is not supported by this model's engine", param=name)
        if job.grammar is not None and job.grammar.kind not in GRAMMARS:
            raise InvalidRequest(
                f"a grammar of kind {job.grammar.kind} is not supported by this model's engine", param="grammar"
            )

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        """Run a call. The server's `output_ids` may be cumulative: only what is new is delivered.

        Raises Overloaded for a prompt that nobody computed, on a server that only decodes."""
        if self._rooms.mode == "decode" and not call.reference:
            raise Overloaded("this node's engine only decodes: no prefill node is ready", retry_after=1.0)
        if self._rooms.mode == "prefill":
            deliver(await self.prefill_leg(call if call.reference else replace(call, reference=self.room(""))))
            return
        seen, ended = 0, False

        def event(chunk: dict[str, Any]) -> None:
            nonlocal seen, ended
            if (error := chunk.get("error")) is not None:
                raise StepFailed(f"the engine failed: {str(error)[:500]}")
            meta, ids = chunk["meta_info"], chunk["output_ids"]
            total = int(meta["completion_tokens"])
            new = ids[len(ids) - (total - seen) :] if total > seen else []
            reason = finish_reason(meta.get("finish_reason"))
            ended = ended or reason is not None
            if new or reason is not None:
                deliver(
                    EngineDelta(
                        tuple(new), _logprobs(meta, seen, len(new), call.params), reason, meta.get("cached_tokens")
                    )
                )
            seen = total

        async with self._leaving(call):
            await self._http.stream("/generate", body(call), event)
            if not ended:
                raise StepFailed("the engine's answer ended without a finish reason")

    def room(self, host: str) -> str:
        """Return the reference of a new room (`RoomEngine`)."""
        return self._rooms.draw(host)

    async def prefill_leg(self, call: EngineCall) -> EngineDelta:
        """Compute a prompt in a room (`RoomEngine`). Raises StepFailed if the server abandons it."""
        call = replace(call, params=replace(call.params, max_tokens=1, min_tokens=min(1, call.params.min_tokens)))
        async with self._leaving(call):
            reported = await self._http.post("/generate", {**body(call), "stream": False}, None)
            meta = reported["meta_info"]
            reason, tokens = finish_reason(meta.get("finish_reason")), tuple(reported.get("output_ids") or ())[:1]
            if not tokens:
                raise StepFailed("the engine's answer to a prompt has no token")
            logprobs = _logprobs(meta, 0, len(tokens), call.params)
            return EngineDelta(tokens, logprobs, reason or "length", meta.get("cached_tokens"))

    async def switch_role(self, role: str, graphs_gb: float = 0.0) -> None:
        """Make the server a prefill or decode server (`ElasticEngine`)."""
        await switch_role(self._http, role, graphs_gb)

    @asynccontextmanager
    async def _leaving(self, call: EngineCall) -> AsyncIterator[None]:
        """Abort a call in a room on the server if it ends early: the other leg may never come."""
        try:
            yield
        except BaseException:
            if call.reference:
                task = asyncio.create_task(self._abort(call.request_id), name="abort")
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(KvferryError):
            await self._http.post("/abort_request", {"rid": request_id})

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _metrics(self) -> str:
        """Return the server's metrics; empty if it was started without --enable-metrics."""
        try:
            return await self._http.text("/metrics")
        except StepFailed:
            return ""


def body(call: EngineCall) -> dict[str, Any]:
    """Return the body of a request."""
    built: dict[str, Any] = {
        "rid": call.request_id,
        "input_ids": call.token_ids,
        "sampling_params": sampling(call.params, call.grammar),
        "stream": True,
    }
    if call.params.logprobs is not None:
        built |= {"return_logprob": True, "top_logprobs_num": call.params.logprobs}
    if call.adapter:
        built["lora_path"] = call.adapter
    if call.cache_salt:
        built["cache_salt"] = call.cache_salt
    if call.reference:
        room = json.loads(call.reference)
        built |= {name: room[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    return built


def sampling(params: SamplingParams, grammar: Grammar | None) -> dict[str, Any]:
    """Return SGLang's sampling_params."""
    built: dict[str, Any] = {
        **common_sampling(params),
        "max_new_tokens": max(1, params.max_tokens),
        "min_new_tokens": params.min_tokens,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "sampling_seed": params.seed % 2**31,
    }
    if grammar is not None:
        built[GRAMMARS[grammar.kind]] = grammar.source or '{"type": "object"}'
    return built


def finish_reason(reported: Any) -> str | None:
    """Return stop, length or None. Raises StepFailed if the engine aborted the request."""
    if reported is None:
        return None
    kind = reported.get("type") if isinstance(reported, dict) else reported
    if kind not in ("stop", "length"):
        raise StepFailed(f"the engine ended the request: {reported}")
    return str(kind)


def event_source(reported: Any, host: str) -> KvEventSource | None:
    """Return where the server publishes KV events, from its `kv_events`; None: nowhere."""
    if not isinstance(reported, dict) or reported.get("publisher") != "zmq":
        return None
    at = reachable(f"tcp://{reported.get('endpoint_host', '*')}:", host)
    replay = reported.get("replay_endpoint_port_base")
    return KvEventSource(
        f"{at}{reported['endpoint_port_base']}", f"{at}{replay}" if replay else "", str(reported.get("topic") or "")
    )


def _logprobs(meta: dict[str, Any], seen: int, new: int, params: SamplingParams) -> tuple[TokenLogprobs, ...] | None:
    """Return the entries of the new tokens; SGLang's lists hold (logprob, token, text) and may be cumulative."""
    if params.logprobs is None or not new:
        return None
    own = meta["output_token_logprobs"][-new:]
    top = (meta.get("output_top_logprobs") or [])[-new:] or [()] * new
    found = []
    for (logprob, token, *_), likely in zip(own, top, strict=True):
        rows = tuple((each[1], each[0]) for each in likely or ())
        rank = next((at for at, row in enumerate(rows, start=1) if row[0] == token), len(rows) + 1)
        found.append(TokenLogprobs(token, logprob, rank, rows))
    return tuple(found)


def _process(metrics: str) -> str:
    return str(value(metrics, "process_start_time_seconds") or "")
