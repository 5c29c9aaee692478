"""TLS settings of servers, and of the router's connections to workers, checked and loaded."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

import uvicorn

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.errors import ConfigError, reason


def server_tls(settings: CommonSettings) -> dict[str, Any]:
    """Return uvicorn's TLS options; raise ConfigError for key or CA files without a certificate."""
    if not settings.ssl_certfile:
        if given := [name for name in ("ssl_keyfile", "ssl_ca_certs") if getattr(settings, name)]:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --ssl-certfile", param=given[0])
        return {}
    return {
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile or None,
        "ssl_ca_certs": settings.ssl_ca_certs or None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    }


def load(config: uvicorn.Config) -> uvicorn.Config:
    """Read the files that the configuration names, and return it; raise ConfigError."""
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {reason(error)}") from error
    return config


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """Encryption of connections to workers.

    context      verifies workers' certificates, and every worker must have one; None: no worker is dialled over TLS
    server_name  name that their certificates must carry; empty: the host of each address
    """

    context: ssl.SSLContext | None = None
    server_name: str = ""

    def options(self, url: SplitResult) -> dict[str, Any]:
        """Return options of asyncio's `create_connection`; raise OSError if the address may not be dialled."""
        if url.scheme != "https":
            if self.context is not None:
                raise OSError("its address has no TLS, which --worker-ca-certs requires")
            return {}
        if self.context is None:
            raise OSError("its address has TLS: name the authority of its certificate with --worker-ca-certs")
        return {"ssl": self.context, "server_hostname": self.server_name or url.hostname}


PLAIN = WorkerTls()


def worker_tls(ca_certs: str, server_name: str) -> WorkerTls:
    """Return the encryption that the router's settings choose. Raises ConfigError."""
    if not ca_certs:
        if server_name:
            raise ConfigError("--worker-server-name needs --worker-ca-certs", param="worker_server_name")
        return PLAIN
    try:
        context = ssl.create_default_context(cafile=ca_certs)
    except OSError as error:
        raise ConfigError(f"--worker-ca-certs {ca_certs}: {reason(error)}", param="worker_ca_certs") from error
    return WorkerTls(context, server_name)
