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


NO_PREFILL = Rates(prefill_tokens_per_s=0.1)
"""Rates of an engine that only decodes: routers take it for a node where prompts take for ever."""


async def measured_engine(engine: Engine, *, exact: bool = True, media: bool, kv_role: str = "") -> MeasuredEngine:
    """Measure an idle engine. exact, kv_role: see EngineFacts; media: whether to measure those. Raises what it raises.

    An engine with half of the work alone cannot generate: nothing is known of it but the rate of its prompts.

    A model that transcribes may take no prompts without audio, and one that embeds may generate nothing: it keeps
    nothing, and its rates are unknown."""
    if kv_role == "decode":
        return MeasuredEngine((), (), NO_PREFILL)
    if kv_role == "prefill":
        return MeasuredEngine((), (), await Measurement(engine).rates())
    modalities = await measured_modalities(engine) if media else ()
    pooling = await measured_pooling(engine)
    measurement = Measurement(engine, exact=exact)
    try:
        return MeasuredEngine(await measurement.guarantees(), modalities, await measurement.rates(), pooling)
    except (InvalidRequest, StepFailed):
        if TRANSCRIPTION not in modalities and not pooling.tasks:
            raise
        return MeasuredEngine((), modalities, Rates(), pooling)
