"""All that an adapter measures of its engine before it joins."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.engine_adapter.engine import Engine
from kvferry.engine_adapter.measured_guarantees import Measurement
from kvferry.engine_adapter.measured_modalities import measured_modalities
from kvferry.engine_adapter.measured_pooling import NO_POOLING, MeasuredPooling, measured_pooling
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.lease import Rates
from kvferry.protocol.media import TRANSCRIPTION


class MeasuredEngine(NamedTuple):
    """What an engine keeps, the media that it reads, its first rates, as in a lease, and what it makes of prompts."""

    guarantees: tuple[str, ...]
    modalities: tuple[str, ...]
    rates: Rates
    pooling: MeasuredPooling = NO_POOLING


async def measured_engine(engine: Engine, *, exact: bool = True, media: bool) -> MeasuredEngine:
    """Measure an idle engine. exact: see EngineFacts; media: whether to measure those, too. Raises what it raises.

    A model that transcribes may take no prompts without audio, and one that embeds may generate nothing: it keeps
    nothing, and its rates are unknown."""
    modalities = await measured_modalities(engine) if media else ()
    pooling = await measured_pooling(engine)
    measurement = Measurement(engine, exact=exact)
    try:
        return MeasuredEngine(await measurement.guarantees(), modalities, await measurement.rates(), pooling)
    except (InvalidRequest, StepFailed):
        if TRANSCRIPTION not in modalities and not pooling.tasks:
            raise
        return MeasuredEngine((), modalities, Rates(), pooling)
