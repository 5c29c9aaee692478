"""Messages and names for LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(8, checked=True)
@dataclass(frozen=True, slots=True)
class AdapterName:
    """An adapter that a node holds: what clients call it, and the id of its content."""

    name: str
    id: str


@message(9, checked=True)
@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """Router → any node, `POST /adapters`: hold the adapter in the directory `path` (of the node's machine) under this
    name, or with an empty path no longer. Answered once it is so."""

    name: str
    path: str = ""
