"""Request bodies for the OpenAI completions API, and the check for parameters that it lacks."""

from __future__ import annotations

from typing import Any

from kvferry.engine_adapter.engine import EngineCall
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.messages import Job
from kvferry.protocol.work import Generate

UNSUPPORTED = ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids",
               "prompt_logprobs", "ignore_eos")  # fmt: skip
"""Parameters that the API does not name: a server may ignore them silently."""
_OFF: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "repetition_penalty": (1.0,)}
"""Values that turn a parameter off, if they are not None, empty or 0."""
MAX_API_LOGPROBS = 5
"""Maximum number of likely tokens for which the API returns log-probabilities."""


def check(job: Job, *, exact: bool) -> None:
    """Raise InvalidRequest, naming the field, for what the API cannot do. exact: the server returns token ids."""
    if not isinstance(job.work, Generate):
        raise InvalidRequest("this model's engine only generates", param="model")
    params = job.params
    lacks = UNSUPPORTED if exact else (*UNSUPPORTED, "stop_token_ids")
    for name in lacks:
        value = getattr(params, name)
        if value not in _OFF.get(name, (None, (), 0)):
            raise InvalidRequest(
                f"{name} is not supported by this model's engine, limited to the OpenAI API", param=name
            )
    if (params.logprobs or 0) > MAX_API_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be at most {MAX_API_LOGPROBS} for this model's engine, got {params.logprobs}",
            param="logprobs",
        )
    if job.grammar is not None:
        raise InvalidRequest("grammars and JSON schemas are not supported by this model's engine", param="grammar")


def body(call: EngineCall, model: str, *, extras: bool) -> dict[str, Any]:
    """Return the body of a request. extras: the server accepts fields that the API does not name."""
    params = call.params
    built: dict[str, Any] = {
        "model": model,
        "prompt": call.token_ids,
        "max_tokens": max(1, params.max_tokens),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed % 2**31,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(params, name):
            built[name] = value
    if params.logit_bias:
        built["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.logprobs is not None:
        built["logprobs"] = max(1, params.logprobs)  # a server may take 0 for none
    if extras:
        built["return_token_ids"] = True
        if params.logprobs is not None:
            built["return_tokens_as_token_ids"] = True
        if call.cache_salt:
            built["cache_salt"] = call.cache_salt
    return built
