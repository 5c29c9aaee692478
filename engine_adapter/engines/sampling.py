"""Fields of sampling_params that vLLM and SGLang have in common."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.sampling import SamplingParams


def common_sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of sampling_params that both engines share.

    Their own end-of-sequence tokens are off: the router says which tokens end an output."""
    built: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "stop_token_ids": params.ending_token_ids,
        "ignore_eos": True,
    }
    if params.logit_bias:
        built["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return built
