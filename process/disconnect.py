"""How a response learns that its reader went away."""

from __future__ import annotations

from starlette.types import Receive


async def disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
