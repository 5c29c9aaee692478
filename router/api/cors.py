"""CORS middleware around the router's application, if its settings allow any origin."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.admission import ADAPTED

SHOWN = (
    "x-request-id", "x-kvferry-route", "retry-after", ADAPTED,
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)  # fmt: skip
"""Response headers that pages of other origins may read."""


def across_origins(app: ASGIApp, settings: RouterSettings) -> ASGIApp:
    """Wrap the application with CORS handling if the settings allow any origin.

    It wraps Ingress, since a preflight request carries no key."""
    origins = _listed(settings.allowed_origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_listed(settings.allowed_methods),
        allow_headers=_listed(settings.allowed_headers),
        allow_credentials=settings.allow_credentials,
        expose_headers=SHOWN,
    )


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
