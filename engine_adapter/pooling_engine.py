"""Interface to an engine that makes vectors of prompts, or logits of a classifier's labels."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, Protocol

PoolingTask = Literal["embed", "classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify")


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One prompt for an engine that generates nothing; the fields are those of `engine.EngineCall`."""

    request_id: str
    token_ids: tuple[int, ...]
    adapter: str = ""
    cache_salt: str = ""


class PoolingEngine(Protocol):
    """The part of an engine's client that generates nothing. Its calls raise what those of `engine.Engine` raise."""

    async def pool(self, task: PoolingTask, call: PoolingCall) -> array[float]:
        """Return a prompt's vector, or one logit for each label without an activation.

        A vector has the model's full width, and is not scaled if the engine can omit that. The engine pools as
        it was started."""
        ...
