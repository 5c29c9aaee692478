"""Interface to an engine that makes vectors of prompts, or logits of a classifier's labels."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from kvferry.engine_adapter.engine import EngineCall

PoolingTask = Literal["embed", "classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify")


class PoolingEngine(Protocol):
    """The part of an engine's client that generates nothing. Its calls raise what those of `engine.Engine` raise."""

    async def pool(self, task: PoolingTask, call: EngineCall) -> array[float]:
        """Return the numbers of a prompt: its vector, or one logit for each label without an activation.

        A vector has all numbers of the model, and is not scaled if the engine can leave that out. The engine pools as
        it was started; the call's sampling parameters do not matter."""
        ...
