"""Measures, when an adapter joins, whether its engine embeds or classifies, and how it scales vectors."""

from __future__ import annotations

import logging
import math
import time
from array import array
from dataclasses import dataclass

from kvferry.engine_adapter.engine import Engine
from kvferry.engine_adapter.measured_guarantees import IDS, MIN_ID
from kvferry.engine_adapter.pooling_engine import POOLING_TASKS, PoolingCall, PoolingEngine, PoolingTask
from kvferry.protocol.errors import InvalidRequest, Overloaded, StepFailed

log = logging.getLogger("kvferry.adapter")

LENGTHS = (5, 24)
"""Tokens of the prompts whose vectors are measured."""
GUARANTEES: dict[PoolingTask, str] = {"embed": "embeds", "classify": "classifies"}
"""Names of the tasks among `protocol.lease.GUARANTEES`."""
UNIT = 1e-3
"""Maximum deviation from 1 of the length of a vector that was scaled to it: bfloat16 has no more digits."""


@dataclass(frozen=True, slots=True)
class MeasuredPooling:
    """Pooling of an engine. tasks: those that it can do. scaled: its vectors have length 1, whatever is asked for."""

    tasks: tuple[PoolingTask, ...] = ()
    scaled: bool = False

    @property
    def guarantees(self) -> tuple[str, ...]:
        """Return the tasks as names of `protocol.lease.GUARANTEES`."""
        return tuple(GUARANTEES[task] for task in self.tasks)


NO_POOLING = MeasuredPooling()
"""Value for an engine that only generates."""


async def measured_pooling(engine: Engine) -> MeasuredPooling:
    """Measure an idle engine. Raises NodeDown and NodeLost as the engine does."""
    if engine.pooling is None:
        return NO_POOLING
    found = {task: vectors for task in POOLING_TASKS if (vectors := await _vectors(engine.pooling, task))}
    scaled = all(abs(math.hypot(*vector) - 1) < UNIT for vector in found.get("embed", ()))
    if found:
        log.info("measured: the engine can %s", " and ".join(found))
    return MeasuredPooling(tuple(found), scaled and "embed" in found)


async def _vectors(engine: PoolingEngine, task: PoolingTask) -> list[array[float]]:
    """Return the numbers of prompts that differ; none if the engine refuses, or gives no numbers that differ."""
    salt = f"measured-{task}-{time.time_ns()}"
    found: list[array[float]] = []
    for length in LENGTHS:
        prompt = tuple(MIN_ID + 11 * at % IDS for at in range(length))
        call = PoolingCall(f"{salt}-{length}", prompt, cache_salt=salt)
        try:
            found.append(await engine.pool(task, call))
        except (InvalidRequest, StepFailed, Overloaded) as error:
            log.debug("the engine does not %s: %s", task, error.message)
            return []
    sound = len({len(each) for each in found}) == 1 and all(map(math.isfinite, found[0])) and len(found[0]) > 0
    return found if sound and found[0] != found[1] else []
