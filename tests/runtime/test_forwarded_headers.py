"""Headers of a trusted reverse proxy name the client; requests without them pass by uvicorn's middleware."""

from __future__ import annotations

from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from kvferry.runtime.forwarded_headers import ForwardedHeaders, lighten_proxy_headers

TRUSTED, STRANGER = ("127.0.0.1", 5), ("10.0.0.9", 5)


async def nothing(*_: Any) -> dict[str, Any]:
    return {}


async def unused(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that nobody calls."""


async def client_of(client: tuple[str, int], *headers: tuple[bytes, bytes]) -> tuple[str, str]:
    """Whom the application takes for its client, and the scheme."""
    seen: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["client"][0], scope["scheme"]))

    config = uvicorn.Config(app, lifespan="off")
    config.load()
    lighten_proxy_headers(config)
    assert isinstance(config.loaded_app, ForwardedHeaders)
    scope = {"type": "http", "scheme": "http", "client": client, "headers": [(b"host", b"h"), *headers]}
    await config.loaded_app(scope, nothing, nothing)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize("headers", [(), ((b"x-forwarded", b"9.9.9.9"),), ((b"forwarded", b"for=9.9.9.9"),)])
async def test_without_them_the_client_is_the_peer(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert await client_of(TRUSTED, *headers) == ("127.0.0.1", "http")


async def test_a_trusted_proxy_names_the_client_and_a_stranger_does_not() -> None:
    headers = (b"x-forwarded-for", b"9.9.9.9"), (b"x-forwarded-proto", b"https")
    assert await client_of(TRUSTED, *headers) == ("9.9.9.9", "https")
    assert await client_of(STRANGER, *headers) == ("10.0.0.9", "http")


def test_a_configuration_without_the_middleware_is_left_alone() -> None:
    config = uvicorn.Config(unused, proxy_headers=False, lifespan="off")
    config.load()
    app = config.loaded_app
    lighten_proxy_headers(config)
    assert config.loaded_app is app
