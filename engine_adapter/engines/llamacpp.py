"""Client of llama.cpp's server, which takes and returns token ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts, EngineLoad
from kvferry.engine_adapter.engines.listed_vectors import LlamaCppPooling
from kvferry.engine_adapter.engines.llamacpp_answer import Answer
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.protocol.errors import InvalidRequest, KvferryError, StepFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.work import Grammar
from kvferry.runtime import background

UNSUPPORTED = ("bad_words", "allowed_token_ids", "prompt_logprobs", "min_tokens")
"""Parameters that the server lacks, or has with another meaning."""
GRAMMARS = ("json_schema", "json_object", "ebnf")
ANY_JSON = {"type": ["object", "array", "string", "number", "boolean", "null"]}
RANDOM_SEED = 2**32 - 1
"""Seed that the server takes as "choose one"; real seeds are below it."""
MAX_SPELLED = 4096
"""Maximum number of texts whose tokens are remembered."""
END_S = 1.0
"""Maximum time between the last event of an answer and its end, in seconds."""
BLOCK_SIZE = 32
"""Tokens per block in kvferry's index: the server keeps whole sequences, by slot."""


class LlamaCppEngine:
    """Client of one llama.cpp server. Implements `engine.Engine`.

    The server has no salt for tenants: requests of tenants that are kept apart reuse no cached prefix."""

    media = None

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.pooling = LlamaCppPooling(http)
        self._context = 0
        self._spelled: dict[str, tuple[int, ...]] = {}

    async def facts(self) -> EngineFacts:
        """Return the server's build, model, context and slots."""
        props = await self._http.get("/props")
        models = await self._http.get("/v1/models")
        slots = int(props.get("total_slots") or 1)
        context = self._context = int(props["default_generation_settings"]["n_ctx"])
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
        """Return the number of slots in use."""
        slots, props = await self._http.get("/slots"), await self._http.get("/props")
        busy = sum(bool(each.get("is_processing")) for each in slots)
        return EngineLoad(process=_process(props), running_requests=busy, cache_usage=busy / max(1, len(slots)))

    def check(self, job: Job) -> None:
        """Raise InvalidRequest for what llama.cpp cannot do."""
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
        """Run a call. The server knows end-of-sequence tokens of its own; other stop tokens end the output here."""
        answer = Answer(call.params, self._tokenized, deliver)
        chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        stream = asyncio.create_task(
            self._http.stream("/completion", body(call, self._context), chunks.put_nowait), name="completion"
        )
        stream.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while not answer.ended and (chunk := await chunks.get()) is not None:
                await answer.take(chunk)
            if not answer.ended:
                await stream
                raise StepFailed("the engine's answer ended without a finish reason")
            if answer.reported_end:  # the connection stays open for the next call
                await asyncio.wait({stream}, timeout=END_S)
        finally:
            with contextlib.suppress(KvferryError):
                await background.end(stream)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _tokenized(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, by the server's own tokenizer."""
        if (known := self._spelled.get(text)) is not None:
            return known
        if len(self._spelled) >= MAX_SPELLED:
            self._spelled.clear()
        reported = await self._http.post("/tokenize", {"content": text, "add_special": False, "parse_special": False})
        found = self._spelled[text] = tuple(reported["tokens"])
        return found


def body(call: EngineCall, context: int) -> dict[str, Any]:
    """Return the body of a request. All samplers are named: the server's defaults are not the API's.

    context: tokens of a slot, which is how far back penalties look."""
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
        "repeat_last_n": context,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed % RANDOM_SEED,
        "ignore_eos": params.ignore_eos and call.grammar is None,  # else a complete grammar cannot end: error 500
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
        "mirostat": 0,
        "dynatemp_range": 0.0,
        "backend_sampling": False,
        "n_probs": 0 if params.logprobs is None else max(1, params.logprobs),
        "return_progress": True,
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
    if not grammar.source:
        return {"json_schema": {"type": "object"}}
    return {"json_schema": json.loads(grammar.source) or ANY_JSON}  # the server reads {} as any object


def _process(props: dict[str, Any]) -> str:
    """Return an id of the server's process: its marker for images, which is random in newer builds."""
    return " ".join(str(props.get(name, "")) for name in ("model_path", "build_info", "media_marker"))
