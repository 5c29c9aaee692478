"""Measurement of what an engine keeps, when its adapter joins: resumption, replay, and independence of the batch."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import count

from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta
from kvferry.protocol.lease import Rates
from kvferry.protocol.sampling import SamplingParams

log = logging.getLogger("kvferry.adapter")

PROMPT_TOKENS, OUTPUT_TOKENS, RESUMED_AT = 48, 24, 12
LEAST_ID, IDS = 40, 400
"""First and number of the token ids that prompts are made of: past the special tokens of most vocabularies."""
BESIDE = 3
"""Other requests that run beside the one whose batch is varied."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=20_261, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


class Measurement:
    """Runs short requests on an idle engine. Raises what the engine raises.

    exact: see EngineFacts; without token ids of the engine's own there is nothing to compare."""

    def __init__(self, engine: Engine, *, exact: bool = True) -> None:
        self._engine, self._exact = engine, exact
        self._numbers = count()
        self._salt = f"measured-{time.time_ns()}"

    async def guarantees(self) -> tuple[str, ...]:
        """Return the names of `protocol.lease.GUARANTEES` that held."""
        kept: list[str] = []
        if not self._exact:
            log.info("the engine sends text alone: it keeps nothing exactly")
            return ()
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
            whole = await self._tokens(params)
            later = await self._tokens(params, whole[:RESUMED_AT])
            if whole[RESUMED_AT:] == later:
                kept.append(f"{name}_resume")
            if whole == await self._tokens(params):
                kept.append(f"{name}_replay")
            if name == "greedy":
                beside, *_ = await asyncio.gather(
                    self._tokens(params), *(self._tokens(SEEDED, shift=each + 1) for each in range(BESIDE))
                )
                if beside == whole:
                    kept.append("batch_invariant")
        log.info("measured: the engine keeps %s", ", ".join(kept) or "nothing")
        return tuple(kept)

    async def rates(self) -> Rates:
        """Return the first rates: of a prompt that is not cached, and of a stream that runs alone."""
        times: list[float] = []
        began = time.monotonic()
        await self._engine.generate(self._call(SEEDED, (), 7), lambda delta: times.append(time.monotonic()))
        first_s, steps = max(1e-4, times[0] - began), max(1, len(times) - 1)
        return Rates(PROMPT_TOKENS / first_s, max(1e-4, (times[-1] - times[0]) / steps))

    async def _tokens(self, params: SamplingParams, delivered: tuple[int, ...] = (), shift: int = 0) -> tuple[int, ...]:
        tokens: list[int] = []

        def deliver(delta: EngineDelta) -> None:
            tokens.extend(delta.token_ids)

        await self._engine.generate(self._call(params, delivered, shift), deliver)
        return tuple(tokens)

    def _call(self, params: SamplingParams, delivered: tuple[int, ...], shift: int) -> EngineCall:
        prompt = tuple(LEAST_ID + (7 * at + 31 * shift) % IDS for at in range(PROMPT_TOKENS))
        left = SamplingParams(
            temperature=params.temperature, seed=params.seed, max_tokens=OUTPUT_TOKENS - len(delivered), ignore_eos=True
        )
        number = next(self._numbers)
        return EngineCall(f"{self._salt}-{number}", prompt + delivered, left, cache_salt=self._salt)
