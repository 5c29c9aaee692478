"""Priorities and service tiers: how urgent a client says that its request is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvferry.protocol.sampling import MAX_COUNT
from kvferry.router.api.bodies.fields import Integer, told

TIER_PRIORITY = {"priority": -1, "flex": 1}
"""Priority among a tenant's own requests by tier, where the body gives none; lower is served earlier."""


class TierFields(BaseModel):
    """Fields of how urgent a request is. Of OpenAI's tiers `auto`, `default` and `scale` are served alike."""

    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "priority", "scale"],
            told("must be auto, default, flex, priority or scale"),
        ]
        | None
    ) = None

    priority: Annotated[Integer, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None

    @property
    def is_patient(self) -> bool:
        """Return whether nobody waits for the request (`flex`): its tenant's targets do not concern it."""
        return self.service_tier == "flex"

    def tier_used(self, *, is_patient: bool) -> str:
        """Return the tier that serves the request: flex, priority or default.

        is_patient: it yields to others, as a batch's rows do, so that it has no priority."""
        if self.service_tier == "priority" and is_patient:
            return "default"
        return self.service_tier if self.service_tier in TIER_PRIORITY else "default"
