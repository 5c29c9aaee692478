"""RequestBody: base model of all request bodies, with the model's name."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kvferry.router.api.bodies.fields import Name


class RequestBody(BaseModel):
    """Fields that all request bodies share."""

    model_config = ConfigDict(extra="ignore")

    model: Name | None = None

    def check(self) -> None:
        """Raise InvalidRequest for errors that no single field shows."""
