"""One TLS context for all HTTP clients of a process: each would read the certificates anew, for 13 ms, and tests that
wait make a client for every look."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

from httpx._transports import default

OWN = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that name other certificates."""


def share_tls_context() -> None:
    """Let clients that name no certificates share the context of the first one."""
    make = default.create_ssl_context  # type: ignore[attr-defined]
    usual = functools.cache(make)

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None and not any(name in os.environ for name in OWN):
            return usual()
        return make(verify=verify, cert=cert, trust_env=trust_env)

    default.create_ssl_context = shared  # type: ignore[attr-defined]
