"""Body fields n, best_of and beam search, with the checks of which fields exclude each other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictBool, StrictFloat

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_LOGPROBS
from kvferry.router.api.bodies.fields import Integer

MAX_CHOICES = 128
"""Largest n and best_of, in sequences per prompt."""
MAX_BEAMS = MAX_LOGPROBS // 2
"""Largest number of beams; a beam's extensions come from twice as many likeliest tokens."""
MAX_LENGTH_PENALTY = 10.0
"""Largest absolute exponent of the length penalty."""
NEUTRAL_FOR_BEAMS: dict[str, Any] = {
    "logit_bias": {}, "allowed_token_ids": None, "bad_words": [], "min_tokens": 0, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip
"""Fields that beam search, which uses the model's own log-probabilities, refuses unless they have these values.

As in vLLM, it ignores temperature, top_p, top_k, min_p and seed, because it does not sample."""


class ChoiceFields(BaseModel):
    """Fields for the number of sequences: best_of are generated, or kept as beams, and n of them shown."""

    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: StrictBool | None = False
    length_penalty: Annotated[StrictFloat, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None

    def check_choices(self, made: int, prompt_field: str, *, streams: bool) -> None:
        """Raise InvalidRequest for fields that exclude each other; `made` counts the sequences of each prompt."""
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of must be at least n, got best_of {self.best_of} and n {n}", param="best_of")
        if self.use_beam_search:
            self._check_beams(made, streams=streams)
        elif made > n and prompt_field != "prompt":
            raise InvalidRequest("best_of above n is supported for completions and beam search only", param="best_of")
        elif made > n and streams:
            raise InvalidRequest(
                "best_of above n cannot be streamed: the best are known only at the end", param="best_of"
            )

    def _check_beams(self, made: int, *, streams: bool) -> None:
        if streams:
            raise InvalidRequest("beam search cannot be streamed: its result is known only at the end", param="stream")
        if made > MAX_BEAMS:
            field = "n" if self.best_of is None else "best_of"
            raise InvalidRequest(f"{field} must be at most {MAX_BEAMS} with use_beam_search", param=field)
        for field, neutral in NEUTRAL_FOR_BEAMS.items():
            if getattr(self, field, None) not in (None, neutral):
                raise InvalidRequest(f"{field} is not supported with beam search", param=field)
