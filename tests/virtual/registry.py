"""The registry as one process reaches it: late by the weather, away now and then."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.protocol.errors import RegistryUnavailable
from tests.virtual.weather import Weather

ASKED_S = 0.5
"""What a question to a registry that is away takes."""


class Reached:
    """Every call of the store, from one process."""

    def __init__(self, store: MemoryStore, weather: Weather) -> None:
        self._store, self._weather, self.away = store, weather, False
        self.incompatible = store.incompatible

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        async def call(*args: Any) -> Any:
            await asyncio.sleep(self._weather.delay_s())
            if self.away:
                await asyncio.sleep(ASKED_S)
                raise RegistryUnavailable("cut off")
            answer = await asked(*args)
            await asyncio.sleep(self._weather.delay_s())
            return answer

        return call
