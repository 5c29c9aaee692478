"""Measures, when an adapter joins, which guarantees its engine keeps: resumption, replay, batch independence."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from itertools import count

from kvferry.engine_adapter.engine import Engine, EngineCall, EngineDelta, RoomEngine, TransferEngine
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.lease import Rates
from kvferry.protocol.sampling import SamplingParams

log = logging.getLogger("kvferry.adapter")

PROMPT_TOKENS, OUTPUT_TOKENS, RESUMED_AT = 48, 24, 12
MIN_ID, IDS = 40, 400
"""First and number of the token ids that prompts are made of: past the special tokens of most vocabularies."""
RATED = (7, 11, 13)
"""Numbers of the prompts whose times are taken: the first one after a start is often slow."""
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
            log.info("the engine sends only text: no guarantee holds")
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
        """Return the first rates: of uncached prompts, and of single streams. The fastest run counts."""
        first_s, step_s = math.inf, math.inf
        for shift in RATED:
            began, times = time.monotonic(), await self._times(shift)
            first_s = min(first_s, max(1e-4, times[0] - began))
            step_s = min(step_s, max(1e-4, (times[-1] - times[0]) / max(1, len(times) - 1)))
        return Rates(PROMPT_TOKENS / first_s, step_s, alone_s=step_s)

    async def _times(self, shift: int) -> list[float]:
        times: list[float] = []
        await self._engine.generate(self._call(SEEDED, (), shift), lambda delta: times.append(time.monotonic()))
        return times

    async def transfer(self) -> None:
        """Raise ConfigError unless the engine computes prompts for other engines."""
        if isinstance(self._engine, RoomEngine):
            await self._engine.prefill_leg(replace(self._call(GREEDY, (), 9), reference=self._engine.room("")))
            return
        if isinstance(self._engine, TransferEngine):
            prefilled = await self._engine.prefill(self._call(GREEDY, (), 9))
            if prefilled.reference:
                return
        raise ConfigError(
            "the engine returns no references to the blocks of a prompt, which a prefill node needs: start vLLM with "
            "--kv-transfer-config and a NixlConnector",
            param="role",
        )

    async def _tokens(self, params: SamplingParams, delivered: tuple[int, ...] = (), shift: int = 0) -> tuple[int, ...]:
        tokens: list[int] = []

        def deliver(delta: EngineDelta) -> None:
            tokens.extend(delta.token_ids)

        await self._engine.generate(self._call(params, delivered, shift), deliver)
        return tuple(tokens)

    def _call(self, params: SamplingParams, delivered: tuple[int, ...], shift: int) -> EngineCall:
        prompt = tuple(MIN_ID + (7 * at + 31 * shift) % IDS for at in range(PROMPT_TOKENS))
        left = SamplingParams(
            temperature=params.temperature, seed=params.seed, max_tokens=OUTPUT_TOKENS - len(delivered), ignore_eos=True
        )
        number = next(self._numbers)
        return EngineCall(f"{self._salt}-{number}", prompt + delivered, left, cache_salt=self._salt)
