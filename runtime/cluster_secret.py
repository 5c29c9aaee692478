"""Shared secrets of a cluster, which authenticate calls between its processes.

The header is sent in clear: where others can read the network, it must be closed to them or encrypted.

One secret is enough. While it is exchanged for another there are several: all are accepted, the first is used towards
others, and the file that holds them, one a line, is read again when it changes. So no process needs a restart:
old → old and new → new and old → new, each step once all processes have seen the one before.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
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
LEAST_CHARACTERS, MOST_SECRETS = 16, 16
OPEN = frozenset(("/health", "/ready", "/metrics", "/version"))
"""Paths that tell how a node does, for anyone who watches it, and change nothing."""


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """Keys derived from a cluster secret: `link` for handshakes, `token` for the header of HTTP requests to nodes.

    Both are empty where there is no secret. Both are empty where there is no secret."""

    link: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)


NONE: tuple[ClusterSecret, ...] = (ClusterSecret(),)


class ClusterSecrets:
    """Secrets that are valid now, in the settings' order; callable from any thread.

    True where there are any. Raises ConfigError."""

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
        """Return the accepted link keys; the first is used."""
        return tuple(secret.link for secret in self._now)

    def token(self) -> str:
        """Return the token to show to nodes."""
        return self._now[0].token

    def tokens(self) -> tuple[str, ...]:
        """Return the accepted tokens."""
        return tuple(secret.token for secret in self._now)

    def followed(self) -> AbstractAsyncContextManager[None]:
        """Keep up with the file, if there is one, until the end of the block."""
        return self._file.followed() if self._file else nullcontext()


def read_secrets(text: str) -> tuple[ClusterSecret, ...]:
    """One a line. Raises ConfigError, which tells none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    least, name = LEAST_CHARACTERS, "cluster_secret"
    if not 1 <= len(lines) <= MOST_SECRETS:
        raise ConfigError(f"1 to {MOST_SECRETS} cluster secrets, one a line; here are {len(lines)}", param=name)
    if short := [len(line) for line in lines if len(line) < least]:
        raise ConfigError(f"a cluster secret has {least} characters or more, this one {short[0]}", param=name)
    return tuple(
        ClusterSecret(_derived(line, b"kvferry link"), _derived(line, b"kvferry http").hex()) for line in lines
    )


def _derived(text: str, use: bytes) -> bytes:
    return hmac.digest(text.encode(), use, hashlib.sha256)


class MembersOnly:
    """ASGI middleware of a node: without a token of its cluster only OPEN paths are answered.

    tokens: those that are accepted now."""

    def __init__(self, app: ASGIApp, tokens: Callable[[], Sequence[str]]):
        self._app, self._tokens = app, tokens
        self._refused = RateLimitedLog(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._shows_token(scope):
            client = scope.get("client") or ("an unknown address",)
            self._refused.warning("%s is refused: its request does not show the cluster secret", client[0])
            error = OtherCluster("this node belongs to a cluster whose secret the request does not show")
            await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _shows_token(self, scope: Scope) -> bool:
        shown = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        return any([hmac.compare_digest(shown, token.encode()) for token in self._tokens()])
