"""Messages by which a node passes a router's journals to the store that does not answer the router."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(80, checked=True)
@dataclass(frozen=True, slots=True)
class JournalCall:
    """Router → node, `POST /journals`: a call of one of the journals' scripts.

    script: its name, see `cluster_state.journal_calls`. args: as the store gets them, with entries sealed."""

    script: str
    args: tuple[bytes, ...]


@message(81, checked=True)
@dataclass(frozen=True, slots=True)
class JournalAnswer:
    """Node → router: the store's answer to a JournalCall; empty if it has no such journal."""

    values: tuple[bytes, ...]
