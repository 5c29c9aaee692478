"""Sampling parameters of a request (`SamplingParams`): wire message and validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.protocol.errors import InvalidRequest

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token in logprobs and prompt_logprobs."""
MAX_LOGIT_BIAS = 300
"""Maximum number of entries of logit_bias."""
MAX_ALLOWED = 2**15
"""Maximum number of entries of allowed_token_ids."""
MAX_BAD_WORDS = 256
"""Maximum number of sequences in bad_words."""
MAX_COUNT = 2**31 - 1
"""Maximum value of any count of tokens."""
REPETITION = (0.01, 100.0)
"""Bounds of the repetition penalty, with which logits divided or multiplied by it stay finite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    Names and ranges follow the OpenAI API and vLLM's extensions to it.

    max_tokens / min_tokens  bounds on the number of output tokens; end-of-sequence and stop tokens cannot be drawn
                             before min_tokens
    temperature              0 is greedy
    top_k                    0 or -1: off
    logit_bias               (token id, bias) pairs added to the logits, at most MAX_LOGIT_BIAS
    seed                     with (position, vocabulary index) determines all noise; the router draws one if the client
                             gave none, so that a retried attempt continues the same text
    logprobs                 None: none; k >= 0: log-probability of the drawn token and of the k most likely ones
    prompt_logprobs          the same for every prompt token (the whole prompt is then computed, no prefix is reused)
    stop_token_ids           end the request and are not part of the text
    eos_token_ids            the model's own; ignored with ignore_eos
    allowed_token_ids        None: all; otherwise the only tokens that can be drawn, at most MAX_ALLOWED
    bad_words                token sequences, at most MAX_BAD_WORDS: the last token of one cannot be drawn where output
                             ends with those before it"""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end the request when drawn."""
        return self.stop_token_ids if self.ignore_eos else self.eos_token_ids + self.stop_token_ids

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of its bounds."""
        if not self._is_usual:
            self._validate_numbers()
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token, bias in self.logit_bias:
            _within("logit_bias", token, 0, vocab_size - 1)
            _within("logit_bias", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _within("stop_token_ids", token, 0, vocab_size - 1)
        if self.bad_words or self.allowed_token_ids is not None:
            self._validate_bans(vocab_size)

    @property
    def _is_usual(self) -> bool:
        """Return whether all plain numbers are within their bounds, at the least cost; false for NaN."""
        low, high = REPETITION
        return (
            0 <= self.min_tokens <= self.max_tokens <= MAX_COUNT
            and 0.0 <= self.temperature <= 2.0
            and 0.0 < self.top_p <= 1.0
            and -1 <= self.top_k <= MAX_COUNT
            and 0.0 <= self.min_p <= 1.0
            and low <= self.repetition_penalty <= high
            and -2.0 <= self.frequency_penalty <= 2.0
            and -2.0 <= self.presence_penalty <= 2.0
            and -(2**63) <= self.seed < 2**63
        )

    def _validate_numbers(self) -> None:
        _within("max_tokens", self.max_tokens, 0, MAX_COUNT)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("top_k", self.top_k, -1, MAX_COUNT)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, *REPETITION)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("seed", self.seed, -(2**63), 2**63 - 1)

    def _validate_bans(self, vocab_size: int) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS or not all(self.bad_words):
            raise InvalidRequest(f"bad_words must be at most {MAX_BAD_WORDS} sequences, none empty", param="bad_words")
        for word in self.bad_words:
            _within("bad_words", min(word), 0, vocab_size - 1)
            _within("bad_words", max(word), 0, vocab_size - 1)
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if not 0 < len(allowed) <= MAX_ALLOWED:
            raise InvalidRequest(
                f"allowed_token_ids must have 1 to {MAX_ALLOWED} entries, got {len(allowed)}", param="allowed_token_ids"
            )
        _within("allowed_token_ids", min(allowed), 0, vocab_size - 1)
        _within("allowed_token_ids", max(allowed), 0, vocab_size - 1)
        banned = {word[0] for word in self.bad_words if len(word) == 1}
        if self.min_tokens:
            banned.update(self.ending_token_ids)
        if banned.issuperset(allowed):
            raise InvalidRequest(
                "bad_words and min_tokens exclude all tokens of allowed_token_ids", param="allowed_token_ids"
            )


def _within(name: str, value: float, low: float | None, high: float | None, *, open_low: bool = False) -> None:
    too_low = low is not None and (value <= low if open_low else value < low)
    if not math.isfinite(value) or too_low or (high is not None and value > high):
        lower = "" if low is None else f"greater than {low}" if open_low else f"at least {low}"
        upper = "" if high is None else f"at most {high}"
        bounds = " and ".join(part for part in (lower, upper) if part)
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)
