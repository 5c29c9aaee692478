"""Interface of the store of responses that clients fetch later, bounded in time and in bytes per tenant.

Implementations: `redis_responses.RedisResponses`, and in tests one in memory. Calls raise only RegistryUnavailable, and
every call may be repeated."""

from __future__ import annotations

from typing import Protocol

MAX_RESPONSES = 10_000
"""Maximum number of records of one tenant, whatever their size."""


class ResponseStore(Protocol):
    """Records by tenant and id. Each tenant's records are bounded; the oldest are evicted first."""

    async def put(self, tenant: str, response_id: str, record: bytes) -> bool:
        """Store or replace the record; return False if it alone is larger than a tenant's share."""

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return the record; None if it belongs to another tenant, or was deleted, expired or evicted."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete the record; return whether it existed."""
