"""Responses in process memory, in place of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.cluster_state.responses import MAX_RESPONSES
from kvferry.protocol.errors import RegistryUnavailable


class MemoryResponses:
    """Implements cluster_state.responses.ResponseStore in memory.

    If `available` is False, every call raises RegistryUnavailable."""

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        share: int = 64 * 2**20,
        max_records: int = MAX_RESPONSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.available = True
        self._ttl_s, self._share, self._max_records, self._clock = ttl_s, share, max_records, clock
        self._records: dict[str, dict[str, tuple[bytes, float]]] = {}

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        rows = self._rows(tenant)
        if len(record) > self._share:
            return False
        rows.pop(response_id, None)
        rows[response_id] = (record, self._clock() + self._ttl_s)
        while len(rows) > self._max_records or sum(len(kept) for kept, _ in rows.values()) > self._share:
            del rows[next(iter(rows))]
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        found = self._rows(tenant).get(response_id)
        return None if found is None else found[0]

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._rows(tenant).pop(response_id, None) is not None

    def _rows(self, tenant: str) -> dict[str, tuple[bytes, float]]:
        """Return the tenant's live records, oldest first."""
        if not self.available:
            raise RegistryUnavailable("the response store is switched off")
        rows, now = self._records.setdefault(tenant, {}), self._clock()
        for response_id in [response_id for response_id, (_, ends) in rows.items() if ends <= now]:
            del rows[response_id]
        return rows
