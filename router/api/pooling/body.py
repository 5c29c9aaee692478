"""Body fields that the pooling endpoints share: truncation, cache salt, and inputs as texts or token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT
from kvferry.router.api.bodies.fields import CacheSalt, Integer, Prompts
from kvferry.router.api.bodies.request_body import RequestBody

MAX_INPUTS = 2048
"""Largest number of inputs or texts in a request."""


class PoolingBody(RequestBody):
    """Fields that pooling requests share."""

    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=MAX_COUNT)] | None = None
    user: str | None = None
    cache_salt: CacheSalt | None = None

    def check(self) -> None:
        """Raise InvalidRequest for a truncation to zero tokens."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")


class InputBody(PoolingBody):
    """Pooling request whose `input` becomes a list of texts and tuples of token ids."""

    input: Prompts

    def check(self) -> None:
        """Raise InvalidRequest for no or too many inputs."""
        super().check()
        if not 1 <= len(self.input) <= MAX_INPUTS:
            raise InvalidRequest(f"input must hold 1 to {MAX_INPUTS} items, got {len(self.input)}", param="input")
