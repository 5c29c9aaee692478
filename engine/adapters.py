"""Loaded LoRA adapters of an engine by id: finds an attempt's, and frees a dropped one after its last attempt."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.engine.request import Request
from kvferry.kernels.lora import Adapter
from kvferry.protocol.errors import AdapterNotLoaded


class Adapters:
    """Loaded adapters by id. Owned by the engine thread.

    New attempts cannot use an adapter that is being dropped. Running ones keep it until they end; its memory is freed
    with the last of them."""

    def __init__(self) -> None:
        self._held: dict[str, Adapter] = {}
        self._cancellations: set[Adapter] = set()

    def put(self, adapter: Adapter) -> None:
        """Make the adapter available to new attempts; ignored if one of its id is loaded already."""
        self._held.setdefault(adapter.id, adapter)

    def drop(self, adapter_id: str, here: Iterable[Request]) -> None:
        """Refuse the adapter to new attempts; `here`: the engine's attempts."""
        adapter = self._held.pop(adapter_id, None)
        if adapter is not None:
            self._cancellations.add(adapter)
            self.settle(here)

    def find(self, adapter_id: str) -> Adapter | None:
        """Return the adapter of an attempt; None for the empty id. Raises AdapterNotLoaded."""
        if not adapter_id:
            return None
        if adapter_id not in self._held:
            raise AdapterNotLoaded(f"the adapter {adapter_id} is not loaded here")
        return self._held[adapter_id]

    def settle(self, here: Iterable[Request]) -> None:
        """Release the dropped adapters that no attempt in `here` uses."""
        if self._cancellations:
            unused = self._cancellations - {request.adapter for request in here}
            self._cancellations -= unused
            for adapter in unused:
                adapter.release()
