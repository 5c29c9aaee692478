"""Entry point of `kvferry adapt`."""

from __future__ import annotations

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import AdapterSettings


async def serve_adapter(settings: AdapterSettings) -> None:
    """Run an adapter until SIGTERM or SIGINT, or until its engine ends. Raises ConfigError when it cannot start."""
    raise ConfigError(f"no protocol is known for engine {settings.engine}", param="engine")
