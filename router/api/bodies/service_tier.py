"""Service tier of a request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel

from kvferry.router.api.bodies.fields import told

Tier = Literal["auto", "default", "flex", "priority", "scale"]
"""OpenAI's tiers; `flex` is for requests for whose first token nobody waits."""


class TierFields(BaseModel):
    """Body fields that say how urgent a request is."""

    service_tier: Annotated[Tier, told("must be auto, default, flex, priority or scale")] | None = None

    @property
    def is_patient(self) -> bool:
        """Return whether nobody waits for the first token, so that the tenant's targets do not concern the request."""
        return self.service_tier == "flex"
