"""Shared secrets of a cluster, which authenticate calls between its processes; reloaded from a file for rotation.

The header is sent in clear text: if strangers can read the network, shut them out or encrypt it.

One secret is enough. A rotation needs several: a process accepts all of them and sends the first. It reloads the file
(one secret per line) when the file changes, so no process restarts. Rotate in the steps old → old, new → new, old →
new, each only after all processes have loaded the file of the previous step.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.errors import ConfigError, OtherCluster
from kvferry.runtime.log import RateLimitedLog
from kvferry.runtime.watched_file import WatchedFile

log = logging.getLogger(__name__)
HEADER = "x-kvferry-cluster"
MIN_CHARACTERS, MAX_SECRETS = 16, 16
"""Minimum number of characters of a secret, and maximum number of secrets."""
OPEN = frozenset(("/health", "/ready", "/metrics", "/version"))
"""Read-only status paths that a node answers without a token."""


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """Keys derived from a cluster secret; all are empty without one.

    link: key for handshakes. token: header of HTTP requests to nodes. registry: key for records in Redis."""

    link: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    registry: bytes = field(default=b"", repr=False)


NONE: tuple[ClusterSecret, ...] = (ClusterSecret(),)


class ClusterSecrets:
    """Currently valid secrets, in the order of the settings; thread-safe.

    True if there is at least one. The constructor raises ConfigError."""

    def __init__(self, settings: CommonSettings) -> None:
        self._file: WatchedFile[tuple[ClusterSecret, ...]] | None = None
        self._fixed = NONE
        if settings.cluster_secret:
            self._fixed = read_secrets(settings.cluster_secret)
        elif settings.cluster_secret_file:
            self._file = WatchedFile(settings.cluster_secret_file, "cluster_secret_file", read_secrets)

    def __bool__(self) -> bool:
        return self._now != NONE

    @property
    def _now(self) -> tuple[ClusterSecret, ...]:
        return self._file.value if self._file else self._fixed

    def links(self) -> tuple[bytes, ...]:
        """Return the accepted link keys; this process uses the first for its own handshakes."""
        return tuple(secret.link for secret in self._now)

    def token(self) -> str:
        """Return the token that this process sends to nodes."""
        return self._now[0].token

    def tokens(self) -> tuple[str, ...]:
        """Return the accepted tokens."""
        return tuple(secret.token for secret in self._now)

    def registry_keys(self) -> tuple[bytes, ...]:
        """Return the accepted keys for records in Redis, the first of which signs; none without a secret."""
        return tuple(secret.registry for secret in self._now if secret.registry)

    def followed(self) -> AbstractAsyncContextManager[None]:
        """Reload the file, if there is one, whenever it changes, until the end of the `with` block."""
        return self._file.followed() if self._file else nullcontext()


def read_secrets(text: str) -> tuple[ClusterSecret, ...]:
    """Parse secrets, one per line. Raises ConfigError, whose message contains no secret."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    minimum, name = MIN_CHARACTERS, "cluster_secret"
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise ConfigError(f"expected 1 to {MAX_SECRETS} cluster secrets, one per line, got {len(lines)}", param=name)
    if short := [len(line) for line in lines if len(line) < minimum]:
        raise ConfigError(f"a cluster secret must have at least {minimum} characters, got {short[0]}", param=name)
    return tuple(
        ClusterSecret(
            _derived(line, b"kvferry link"), _derived(line, b"kvferry http").hex(), _derived(line, b"kvferry registry")
        )
        for line in lines
    )


def _derived(text: str, use: bytes) -> bytes:
    return hmac.digest(text.encode(), use, hashlib.sha256)


class MembersOnly:
    """ASGI middleware of a node that rejects requests without a token of its cluster, except on OPEN paths.

    tokens: returns the accepted tokens. keyed: paths whose endpoints check an API key instead."""

    def __init__(self, app: ASGIApp, tokens: Callable[[], Sequence[str]], keyed: Container[str] = ()):
        self._app, self._tokens, self._keyed = app, tokens, keyed
        self._refused = RateLimitedLog(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN and scope["path"] not in self._keyed
        if guarded and not self._shows_token(scope):
            client = scope.get("client") or ("an unknown address",)
            self._refused.warning("rejecting a request of %s, which does not carry the cluster secret", client[0])
            error = OtherCluster("the request does not carry the secret of this node's cluster")
            await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shows_token(self, scope: Scope) -> bool:
        shown = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        return any([hmac.compare_digest(shown, token.encode()) for token in self._tokens()])
