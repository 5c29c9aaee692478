"""Sampling parameters of a request: its own, and the model's defaults for those that it omits."""

from __future__ import annotations

import random

from kvferry.model_files.source import ModelFacts
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.api.bodies.generating import GenerationBody

_FIELDS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip

BadWords = tuple[tuple[int, ...], ...]
"""Token sequences that outputs may not contain."""


def sampling_of(body: GenerationBody, facts: ModelFacts, max_tokens: int, bad_words: BadWords) -> SamplingParams:
    """Return the parameters of a prompt's first choice. Raises InvalidRequest naming the field.

    Without a seed in the body it draws one, so that a retried attempt continues the same text."""
    top = body.top()
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    params = SamplingParams(
        **{**dict(facts.sampling), **given},
        max_tokens=max_tokens,
        logit_bias=tuple((body.logit_bias or {}).items()),
        seed=body.seed if body.seed is not None else random.getrandbits(63),
        logprobs=top or 0 if body.sequences() > (body.n or 1) else top,
        prompt_logprobs=body.prompt_top(),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=bad_words,
        eos_token_ids=facts.eos_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )
    params.validate(facts.vocab_size)
    return params
