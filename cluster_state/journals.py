"""Journals of requests: what a client asked and the tokens delivered so far, for another router to go on with.

Implementations: `redis_journals.RedisJournals` and `memory_journals.MemoryJournals`. Calls raise only
RegistryUnavailable, and every call may be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

MAX_JOURNALS = 10_000
"""Most journals of one tenant, whatever their size."""


class Kept(IntEnum):
    """Outcome of an append.

    YES: it is stored. LOST: another router owns the journal. GONE: it expired, was evicted or deleted. FULL: it alone
    exceeds the tenant's share, and was deleted."""

    LOST = 0
    YES = 1
    GONE = 2
    FULL = 3


HEAD = -1
"""Number of an append that opens a journal without a key: its entry is the head. LOST: the name is in use."""


class Append(NamedTuple):
    """An entry for a journal; `number` counts entries from 0, or is HEAD. An empty one prolongs the journal's life."""

    tenant: str
    name: str
    number: int
    entry: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal as read: its head, its entries from the requested one on, and its owner.

    owner      id of the router that writes it; empty if it was given up
    is_owned   the owner's lease is not over
    age_s      seconds since it was opened
    """

    head: bytes
    entries: list[bytes]
    owner: str
    is_owned: bool
    age_s: float


class Journals(Protocol):
    """Journals by tenant and name, each with one owner; bounded in bytes per tenant. Those that end first go first."""

    async def open(self, tenant: str, name: str, owner: str, head: bytes, *, key: str = "", ttl_s: float) -> str:
        """Open a journal and return "", or the name of the one with this key, or with this name, that exists.

        key: the client's idempotency key; empty: none."""

    async def append(self, owner: str, appends: list[Append]) -> list[Kept]:
        """Append to own journals in one call; return the outcome of each."""

    async def read(self, tenant: str, name: str, since: int = 0) -> Journal | None:
        """Return a journal with its entries from number `since` on; None if there is none."""

    async def claim(self, tenant: str, name: str, owner: str, *, ttl_s: float, by_force: bool = False) -> bool:
        """Own a journal that is not owned, or any one by force; return whether it is own now."""

    async def release(self, tenant: str, name: str, owner: str, *, ttl_s: float) -> bool:
        """Give up an own journal, which lives for `ttl_s` from now; return False if it was not own."""

    async def drop(self, tenant: str, name: str, owner: str) -> bool:
        """Delete an own journal; return False if it was not own."""
