"""LoRA adapters of a node: loads them at start or on request, and keeps the list that its lease announces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request

from kvferry.engine.loop import EngineLoop
from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.base import Computing
from kvferry.kernels.lora import Adapter
from kvferry.model_files.adapter import read_adapter
from kvferry.protocol.adapters import AdapterName, ChangeAdapter
from kvferry.protocol.errors import ConfigError, InvalidRequest
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.http import read_message

log = logging.getLogger("kvferry.worker")


class NodeAdapters:
    """LoRA adapters that the node holds, and their loading and unloading.

    Runs on the asyncio loop. `held`: the adapters that the lease announces. first: the adapters that the engine holds
    from the start. announce: updates the lease in the registry at once."""

    def __init__(
        self,
        settings: WorkerSettings,
        model: Computing,
        engine: EngineLoop,
        first: Sequence[AdapterName],
        announce: Callable[[], Awaitable[object]],
    ) -> None:
        self.held = tuple(first)
        self._settings, self._model, self._engine, self._announce = settings, model, engine, announce
        self._one_by_one = asyncio.Lock()

    async def post_change(self, request: Request) -> None:
        """Load or unload an adapter. Raises InvalidRequest naming the reason."""
        change = await read_message(request, ChangeAdapter)
        async with self._one_by_one:
            await (self._load(change) if change.path else self._unload(change.name))
            await self._announce()

    async def _load(self, change: ChangeAdapter) -> None:
        try:
            adapter = await asyncio.to_thread(read_one, self._settings, self._model, change.path, len(self.held))
        except ConfigError as error:
            raise InvalidRequest(error.message, param="lora_path") from error
        known = {each.name: each.id for each in self.held}
        if known.get(change.name, adapter.id) != adapter.id:
            raise InvalidRequest(
                f"another adapter is loaded as {change.name!r}; unload it first, or choose another name",
                param="lora_name",
            )
        self._engine.submit(lambda engine: engine.adapters.put(adapter))
        if change.name not in known:
            self.held += (AdapterName(change.name, adapter.id),)
            log.info("adapter %s loaded from %s, %.1f MiB", change.name, change.path, adapter.num_bytes / 2**20)

    async def _unload(self, name: str) -> None:
        """Unload the adapter; do nothing if it is not loaded.

        The node may have restarted since the adapter was loaded."""
        adapter_id = next((each.id for each in self.held if each.name == name), "")
        self.held = tuple(each for each in self.held if each.name != name)
        if adapter_id and all(each.id != adapter_id for each in self.held):
            self._engine.submit(lambda engine: engine.adapters.drop(adapter_id, engine.request_table))
            log.info("adapter %s unloaded", name)


def read_one(settings: WorkerSettings, model: Computing, path: str, held: int) -> Adapter:
    """Load the adapter at `path` for a node that already holds `held` adapters. Raises ConfigError."""
    if settings.batch_invariant:
        raise ConfigError("adapters are not batch-invariant; omit --batch-invariant", param="lora")
    if held >= settings.max_loras:
        raise ConfigError(f"{held} adapters are loaded, the limit of --max-loras; unload one", param="lora")
    return load_adapter(read_adapter(path, settings.max_lora_rank), model)


def read_first(settings: WorkerSettings, model: Computing) -> list[tuple[AdapterName, Adapter]]:
    """Load the adapters given by --lora. Raises ConfigError."""
    found: list[tuple[AdapterName, Adapter]] = []
    for given in settings.lora:
        name, _, path = given.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora takes name=path, got {given!r}", param="lora")
        if name in [known.name for known, _ in found]:
            raise ConfigError(f"two adapters have the name {name!r}", param="lora")
        adapter = read_one(settings, model, path, len(found))
        found.append((AdapterName(name, adapter.id), adapter))
    return found
