"""Translation between kvferry's parameters and results and those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.engines.sampling import common_sampling
from kvferry.protocol.errors import StepFailed
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import MAX_LOGPROBS, SamplingParams
from kvferry.protocol.work import Grammar

GRAMMARS = {"json_schema": "json", "json_object": "json_object", "regex": "regex", "choice": "choice",
            "ebnf": "grammar", "lark": "grammar", "structural_tag": "structural_tag"}  # fmt: skip
"""Kinds of grammars, and vLLM's names for them. Its backend `guidance` reads both GBNF and Lark as `grammar`."""

KEEP_BLOCKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""kv_transfer_params that ask a server to keep a prompt's blocks for another one. A client's never get here."""


def body(call: EngineCall, model: str, bad_words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body of a request. bad_words: texts for the call's (`BadWordTexts`).

    End-of-sequence tokens go as stop tokens, so that the router alone decides what ends an output."""
    whole = call.params.prompt_logprobs is not None
    built: dict[str, Any] = {
        "request_id": call.request_id,
        "model": model,
        "token_ids": call.token_ids,
        "sampling_params": sampling(call.params, call.grammar),
        "stream": not whole,
    }
    if not whole:
        built["stream_options"] = {"include_usage": True}
    if bad_words:
        built["sampling_params"]["bad_words"] = bad_words
    if call.cache_salt:
        built["cache_salt"] = call.cache_salt
    if call.reference:
        built["kv_transfer_params"] = json.loads(call.reference)
    return built


def prefill_body(call: EngineCall, model: str, bad_words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body of a request that computes a prompt, whose blocks another server fetches; see `body`."""
    params = replace(call.params, max_tokens=1, min_tokens=min(1, call.params.min_tokens))
    built = body(replace(call, params=params), model, bad_words)
    built.pop("stream_options", None)
    built["stream"] = False
    built["kv_transfer_params"] = dict(KEEP_BLOCKS)
    return built


def sampling(params: SamplingParams, grammar: Grammar | None) -> dict[str, Any]:
    """Return vLLM's sampling_params."""
    built: dict[str, Any] = {
        **common_sampling(params),
        "max_tokens": max(1, params.max_tokens),
        "min_tokens": params.min_tokens,
        "top_k": params.top_k,
        "seed": params.seed,
        "detokenize": False,
    }
    if params.allowed_token_ids is not None:
        built["allowed_token_ids"] = params.allowed_token_ids
    if params.logprobs is not None:
        built["logprobs"] = top_logprobs(params.logprobs)
    if params.prompt_logprobs is not None:
        built["prompt_logprobs"] = params.prompt_logprobs
    if grammar is not None:
        built["structured_outputs"] = structured(grammar)
    return built


def structured(grammar: Grammar) -> dict[str, Any]:
    """Return vLLM's structured_outputs for a grammar."""
    source: Any = grammar.source
    if grammar.kind == "json_object":
        source = True
    elif grammar.kind in ("json_schema", "choice"):
        source = json.loads(source)
    built = {GRAMMARS[grammar.kind]: source}
    if grammar.whitespace is not None:
        built["whitespace_pattern"] = grammar.whitespace
    return built


def top_logprobs(logprobs: int) -> int:
    """Return how many log-probabilities to ask for: vLLM counts the drawn token if it is not among the likely ones."""
    return min(logprobs + 1, MAX_LOGPROBS) if logprobs else 0


def delta(choice: dict[str, Any], params: SamplingParams) -> EngineDelta:
    """Return the delta of a streamed choice. Raises StepFailed if the engine aborted the request."""
    reason = choice.get("finish_reason")
    if reason not in (None, "stop", "length"):
        raise StepFailed(f"the engine ended the request: {reason}")
    reported = choice.get("logprobs")
    rows = reported["content"] if reported and params.logprobs is not None else None
    logprobs = tuple(_logprobs(row, params.logprobs or 0) for row in rows) if rows is not None else None
    return EngineDelta(tuple(choice.get("token_ids") or ()), logprobs, reason)


def whole(answer: dict[str, Any], params: SamplingParams) -> EngineDelta:
    """Return the delta of an answer that is not streamed, with the prompt's log-probabilities."""
    found = delta(answer["choices"][0], params)
    found.cached_tokens = cached_tokens(answer.get("usage") or {})
    rows = answer.get("prompt_logprobs")
    if rows is not None:
        found.prompt_logprobs = tuple(None if row is None else _of_prompt(row, params) for row in rows)
    return found


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """Return the reused tokens; None if the server was started without --enable-prompt-tokens-details."""
    details = usage.get("prompt_tokens_details")
    return int(details.get("cached_tokens") or 0) if details else None


def _logprobs(row: dict[str, Any], most: int) -> TokenLogprobs:
    likely = sorted((each.get("rank") or 2**31, each["token_id"], each["logprob"]) for each in row["top_logprobs"])
    top = tuple((token, logprob) for rank, token, logprob in likely if rank <= most)[:most]
    return TokenLogprobs(row["token_id"], row["logprob"], row.get("rank") or 1, top)


def _of_prompt(row: dict[str, Any], params: SamplingParams) -> TokenLogprobs:
    """Return a prompt position's entry: the token itself comes first in vLLM's map, then the most likely ones."""
    (token, own), *_ = row.items()
    most = params.prompt_logprobs or 0
    likely = sorted((each.get("rank") or 2**31, int(name), each["logprob"]) for name, each in row.items())
    top = tuple((name, logprob) for rank, name, logprob in likely if rank <= most)[:most]
    return TokenLogprobs(int(token), own["logprob"], own.get("rank") or 1, top)
