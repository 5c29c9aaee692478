"""Body fields that name a session (prompt_cache_key), and how long its prompt should stay cached."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel

from kvferry.protocol.fast_init import replaced
from kvferry.router.api.bodies.fields import Name, fail_with
from kvferry.router.dispatch.interface import RequestSpec

Retention = Literal["in_memory", "in-memory", "5m", "1h", "24h"]
"""How long a client asks to keep its prompt: OpenAI's values, and those of Anthropic's `ttl`."""


class SessionFields(BaseModel):
    """OpenAI's fields about the prompt cache; `x-session-id` goes before `prompt_cache_key`."""

    prompt_cache_key: Name | None = None
    prompt_cache_retention: Annotated[Retention, fail_with("must be in_memory, 5m, 1h or 24h")] | None = None

    def in_session(self, spec: RequestSpec) -> RequestSpec:
        """Return the request with the session of its call, and the time for which its prompt should stay cached."""
        requested, session = self.prompt_cache_retention, spec.call.session
        retention = requested if requested in ("1h", "24h") else ""
        return replaced(spec, session=session, retention=retention) if session or retention else spec
