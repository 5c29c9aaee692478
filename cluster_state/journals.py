"""Interface of journals of requests: the request and its delivered tokens, for another router to continue it.

Implementations: `redis_journals.RedisJournals` and `memory_journals.MemoryJournals`. Calls raise only
RegistryUnavailable, and every call may be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

MAX_JOURNALS = 10_000
"""Maximum number of journals of one tenant, of any size."""


class AppendOutcome(IntEnum):
    """Outcome of an append.

    STORED: the entry is stored. LOST: another router owns the journal. GONE: the journal expired, was evicted or
    deleted. FULL: the journal alone exceeds the tenant's share, and was deleted."""

    LOST = 0
    STORED = 1
    GONE = 2
    FULL = 3


HEAD = -1
"""Number of an append that opens a journal without a key; its entry is the head. LOST then means a name in use."""


class Append(NamedTuple):
    """Entry for a journal; `number` counts entries from 0, or is HEAD. An empty entry only renews the TTL."""

    tenant: str
    name: str
    number: int
    entry: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Journal:
    """Journal as read: its head, its entries from the requested one on, and its owner.

    owner      id of the router that writes the journal; empty if it was released
    is_owned   whether the owner's lease is live
    age_s      seconds since the journal was opened
    """

    head: bytes
    entries: list[bytes]
    owner: str
    is_owned: bool
    age_s: float


class Journals(Protocol):
    """Journals by tenant and name, each with one owner; bounded per tenant, the next to expire is evicted first.

    erased_at: monotonic time in seconds at which an append found that the store has lost its data; 0: never."""

    erased_at: float

    async def open(self, tenant: str, name: str, owner: str, head: bytes, *, key: str = "", ttl_s: float) -> str:
        """Open a journal and return "", or the name of the existing journal with this key or this name.

        A repeated call of its owner returns "" again.

        key: the client's idempotency key; empty: none."""

    async def append(self, owner: str, appends: list[Append]) -> list[AppendOutcome]:
        """Append to journals that `owner` owns, in one call; return the outcome of each."""

    async def read(self, tenant: str, name: str, since: int = 0) -> Journal | None:
        """Return a journal with its entries from number `since` on; None if there is none."""

    async def claim(self, tenant: str, name: str, owner: str, *, ttl_s: float, by_force: bool = False) -> bool:
        """Become the owner of a journal without a live owner, or by force of any; return whether it succeeded."""

    async def release(self, tenant: str, name: str, owner: str, *, ttl_s: float) -> bool:
        """Release a journal, which expires in `ttl_s`; return False if `owner` did not own it."""

    async def drop(self, tenant: str, name: str, owner: str) -> bool:
        """Delete a journal; return False if `owner` did not own it."""
