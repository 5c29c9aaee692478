"""HTTP server of a node, bound to its port at once, with the node's public name, URL and cluster secrets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import NodeSettings
from kvferry.runtime.address import host_port, is_loopback
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.http import bind, make_app, make_server
from kvferry.runtime.tls import server_tls

log = logging.getLogger("kvferry.worker")
UNSPECIFIED = ("0.0.0.0", "::", "[::]", "")  # noqa: S104 - binds nothing
"""Listen addresses that other processes cannot dial."""


class NodeAddress:
    """HTTP server of a node, with its name, URL and cluster secrets.

    The constructor binds the socket, so the port is known at once; the server answers between `start` and `stop`. Roles
    add their endpoints to `app`, and to `keyed` the paths that check an API key instead of the secret. Raises
    ConfigError when the address cannot be used."""

    def __init__(
        self,
        settings: NodeSettings,
        health: Callable[[], tuple[int, dict[str, object]]],
        unready: Callable[[], str],
    ) -> None:
        if not settings.advertise_host and settings.host in UNSPECIFIED:
            raise ConfigError(
                f"--host {settings.host} is not an address that other processes can reach; add --advertise-host",
                param="advertise_host",
            )
        self.host = settings.advertise_host or settings.host
        self._socket = bind(settings.host, settings.port)
        port = int(self._socket.getsockname()[1])
        self.url = f"{'https' if settings.ssl_certfile else 'http'}://{host_port(self.host, port)}"
        self.node_id = settings.node_id or f"{settings.role}-{socket.gethostname()}-{port}"
        self.secrets = ClusterSecrets(settings)
        if not self.secrets and not is_loopback(self.host):
            log.warning(
                "no --cluster-secret-file: anyone who can reach %s can inject KV blocks, read tokens and cancel "
                "requests",
                self.host,
            )
        self.keyed: set[str] = set()
        self.app = make_app(health, unready, self.secrets.tokens if self.secrets else None, self.keyed)
        self._server = make_server(self.app, server_tls(settings))
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the HTTP server as an asyncio task."""
        self._serving = asyncio.create_task(self._serve(), name="http-server")

    async def _serve(self) -> None:
        async with self.secrets.followed():
            await self._server.serve(sockets=[self._socket])

    async def stop(self) -> None:
        """Stop the server; open streams get a moment to end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
