"""Wire messages about LoRA adapters: the names that nodes hold, and a router's request to load or unload one."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.wire import message


@message(8, checked=True)
@dataclass(frozen=True, slots=True)
class AdapterName:
    """Adapter that a node holds: the name that clients use, and the id of its content."""

    name: str
    id: str


@message(9, checked=True)
@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """Router → any node, `POST /adapters`: load an adapter under this name, or unload it.

    path: directory on the node's machine; empty: unload. Answered once it is done."""

    name: str
    path: str = ""
