"""Sampling parameters out of a request body."""

from __future__ import annotations

import random

from protocol.errors import ContextLengthExceeded, InvalidRequest
from protocol.sampling import MAX_LOGPROBS, SamplingParams
from router.api.schemas import GenerationBody
from router.text.text_model import TextModel

_FIELDS = ("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty")
_SEEDS = 2**64


def sampling_params(
    body: GenerationBody, text: TextModel, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Validated parameters of the first choice; the model's own defaults stand in for what the body leaves out. Without
    a seed in the body one is drawn here, so that a retried attempt continues the same text. Raises InvalidRequest
    naming the field."""
    given = {name: value for name in (*_FIELDS, "presence_penalty") if (value := getattr(body, name)) is not None}
    params = SamplingParams(
        **{**dict(text.facts.sampling), **given},
        max_tokens=max_tokens,
        logit_bias=tuple((body.logit_bias or {}).items()),
        seed=body.seed if body.seed is not None else random.getrandbits(63),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        eos_token_ids=text.facts.eos_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )
    params.validate(text.facts.vocab_size)
    return params


def choice_seed(seed: int, choice: int) -> int:
    """Seed of the request's choice number `choice` (0 keeps the seed), within 64 signed bits."""
    half = _SEEDS // 2
    return (seed + choice + half) % _SEEDS - half


def output_budget(
    prompt_len: int, asked: int | None, limit: int, *, field: str, default: int | None, asked_field: str
) -> int:
    """max_tokens of a prompt of `prompt_len` tokens, given in `field`: `asked` in `asked_field`, else `default`, else
    the rest of the context of `limit` tokens. An asked 0 (echo only) still takes one. Raises ContextLengthExceeded."""
    room = limit - prompt_len
    wanted = asked if asked is not None else max(1, min(room, default or room))
    needed = max(wanted, 1)
    if needed > room:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens, but the request needs {prompt_len + needed} "
            f"({prompt_len} in the prompt, {needed} for the output); shorten the prompt or ask for fewer tokens",
            param=field if room < 1 else asked_field,
        )
    return wanted


def check_logprobs(name: str, count: int | None) -> int | None:
    """`count`, if it is None or within bounds; raises InvalidRequest naming the field."""
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be at least 0 and at most {MAX_LOGPROBS}, got {count}", param=name)
    return count
