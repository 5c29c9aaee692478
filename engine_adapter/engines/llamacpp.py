"""Client of llama.cpp's server, in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts, EngineLoad
from kvferry.engine_adapter.http_client import EngineHttp, failure
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar

UNSUPPORTED = ("bad_words", "allowed_token_ids", "prompt_logprobs", "min_tokens")
"""Parameters that the server lacks, or has with another meaning."""
GRAMMARS = ("json_schema", "json_object", "ebnf")
BLOCK_SIZE = 32
"""Tokens per block in kvferry's index: the server keeps whole sequences, by slot."""


class LlamaCppEngine:
    """Client of one llama.cpp server. Implements `engine.Engine`.

    The server has no salt for tenants: requests of tenants that are kept apart reuse no cached prefix."""

    media = None

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def facts(self) -> EngineFacts:
        """Return the server's build, model, context and slots."""
        props = await self._http.get("/props")
        models = await self._http.get("/v1/models")
        slots = int(props.get("total_slots") or 1)
        context = int(props["default_generation_settings"]["n_ctx"])
        return EngineFacts(
            kind="llamacpp",
            version=str(props.get("build_info", "")),
            process=_process(props),
            model=str(props.get("model_path", "")),
            served_names=tuple(each["id"] for each in models["data"]),
            max_model_len=context,
            block_size=BLOCK_SIZE,
            total_blocks=slots * context // BLOCK_SIZE,
            max_num_seqs=slots,
            arithmetic=str((models["data"][0].get("meta") or {}).get("size", "")),
        )

    async def health(self) -> None:
        """Return if the server is well and has loaded its model."""
        await self._http.health()

    async def load(self) -> EngineLoad:
        """Return how many slots work."""
        slots, props = await self._http.get("/slots"), await self._http.get("/props")
        busy = sum(bool(each.get("is_processing")) for each in slots)
        return EngineLoad(process=_process(props), running_requests=busy, cache_usage=busy / max(1, len(slots)))

    def check(self, job: Job) -> None:
        """Raise InvalidRequest for what llama.cpp cannot do."""
        if not isinstance(job.work, Generate):
            raise InvalidRequest("this model's engine only generates", param="model")
        for name in UNSUPPORTED:
            if getattr(job.params, name) not in (None, (), 0):
                raise InvalidRequest(f"{name} is not supported by this model's engine", param=name)
        if job.params.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1 for this model's engine, got 0", param="max_tokens")
        if job.grammar is not None and job.grammar.kind not in GRAMMARS:
            raise InvalidRequest(
                f"a grammar of kind {job.grammar.kind} is not supported by this model's engine", param="grammar"
            )

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        """Run a call. The server knows one end-of-sequence token of its own; the others end the output here."""
        ending = frozenset(call.params.ending_token_ids)
        ended = False

        def event(chunk: dict[str, Any]) -> None:
            nonlocal ended
            if (error := chunk.get("error")) is not None:
                raise failure(error)
            if ended:
                return
            tokens = tuple(chunk.get("tokens") or ())
            stops = next((at for at, token in enumerate(tokens, start=1) if token in ending), 0)
            tokens = tokens[:stops] if stops else tokens
            ended = bool(stops or chunk.get("stop"))
            reason = None if not ended else "stop" if stops or chunk.get("stop_type") == "eos" else "length"
            if tokens or ended:
                deliver(EngineDelta(tokens, _logprobs(chunk, len(tokens), call.params), reason, cached_tokens(chunk)))
            if stops:
                raise _Ended

        try:
            await self._http.stream("/completion", body(call), event)
        except _Ended:
            return
        if not ended:
            raise StepFailed("the engine's answer ended without a finish reason")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


class _Ended(Exception):
    """A token ended the output that the server would go on from; the closed connection stops it."""


def body(call: EngineCall) -> dict[str, Any]:
    """Return the body of a request. All samplers are named: the server's defaults are not the API's."""
    params = call.params
    built: dict[str, Any] = {
        "prompt": call.token_ids,
        "n_predict": max(1, params.max_tokens),
        "stream": True,
        "cache_prompt": not call.cache_salt,
        "return_tokens": True,
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": 1.0,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed % 2**32,
        "ignore_eos": params.ignore_eos,
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        "n_probs": params.logprobs or 0,
    }
    if params.logit_bias:
        built["logit_bias"] = [[token, bias] for token, bias in params.logit_bias]
    if call.grammar is not None:
        built |= grammar_of(call.grammar)
    if call.adapter:
        built["lora"] = [{"id": int(call.adapter), "scale": 1.0}]
    return built


def grammar_of(grammar: Grammar) -> dict[str, Any]:
    """Return the fields for a grammar."""
    if grammar.kind == "ebnf":
        return {"grammar": grammar.source}
    return {"json_schema": json.loads(grammar.source) if grammar.source else {"type": "object"}}


def cached_tokens(chunk: dict[str, Any]) -> int | None:
    """Return the prompt tokens that the last chunk says were reused; None before."""
    timings = chunk.get("timings") or {}
    if not chunk.get("stop"):
        return None
    found = timings.get("cache_n")
    return int(found) if found is not None else None


def _logprobs(chunk: dict[str, Any], new: int, params: SamplingParams) -> tuple[TokenLogprobs, ...] | None:
    if params.logprobs is None or not new:
        return None
    rows = (chunk.get("completion_probabilities") or [])[:new]
    if len(rows) < new:
        return None
    return tuple(_row(row) for row in rows)


def _row(row: dict[str, Any]) -> TokenLogprobs:
    top = tuple((each["id"], each["logprob"]) for each in row.get("top_logprobs") or ())
    rank = next((at for at, each in enumerate(top, start=1) if each[0] == row["id"]), len(top) + 1)
    return TokenLogprobs(row["id"], row["logprob"], rank, top)


def _process(props: dict[str, Any]) -> str:
    """Return the model's path and build: the server does not tell when it began."""
    return f"{props.get('model_path')} {props.get('build_info')}"
