"""Keyring: the valid API keys, from the settings and from a file that is reread when it changes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from kvferry.protocol.settings import RouterSettings
from kvferry.router.tenants.keys import Keys, key_hash, read_keys
from kvferry.router.tenants.tenant import NOBODY, Tenant
from kvferry.runtime.watched_file import WatchedFile


class Keyring:
    """API keys of a router, looked up by hash so that timing reveals nothing about a key.

    `guards` is true if clients need a key. `tenants` holds the tenants by name, including NOBODY if it has a key.
    Raises ConfigError if the file cannot be read at the start. If it becomes invalid later, an error is logged and the
    previous keys stay valid."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings_key = {key_hash(settings.api_key.encode()): NOBODY} if settings.api_key else {}
        self._file = WatchedFile(settings.api_keys, "api_keys", read_keys, self._use) if settings.api_keys else None
        self.guards = bool(self._settings_key or self._file)
        self._keys: Keys = {}
        self.tenants: dict[str, Tenant] = {}
        self._use(self._file.value if self._file else {})

    def presented(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of a request; None if a valid key is required and missing.

        The key is in `Authorization: Bearer KEY`, or in `x-api-key`, which clients of the Messages API send. Header
        values arrive decoded as latin-1."""
        if not self.guards:
            return NOBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
        return self.tenant(key.encode("latin-1")) if key else None

    def viewer(self, headers: Mapping[str, str]) -> str | None:
        """Return the tenant that a request may see, or an empty string; None for one that may see all of them.

        Without keys, and with the key of the settings, a request sees all tenants."""
        tenant = self.presented(headers)
        return None if tenant is NOBODY else tenant.name if tenant else ""

    def tenant(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key; None for an unknown key."""
        digest = key_hash(key)
        return self._settings_key.get(digest) or self._keys.get(digest)

    def followed(self) -> AbstractAsyncContextManager[None]:
        """Follow changes of the file until the end of the block."""
        return self._file.followed() if self._file else nullcontext()

    def _use(self, keys: Keys) -> None:
        self._keys = keys
        all_tenants = [*keys.values(), *self._settings_key.values()] if self.guards else [NOBODY]
        self.tenants = {tenant.name: tenant for tenant in all_tenants}
