"""Two decode nodes and two routers on a real Redis, the toy model in each node; and how well prefixes are found: each
request could go to either node, and only one of them holds its prefix."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.lease import Rates
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.dispatch.prefixes import Remembered
from kvferry.router.request_context import RequestContext
from kvferry.worker.rates import RateMeter
from tests.toy import VOCAB, expected, make_engine
from tests.waiting import until
from tests.worker_pair import Worker, worker

PREFIX = 64
"""Tokens; blocks have 4."""
BLOCKS = 8000
MOST_AT_ONCE = 6
SETTLES_S = 0.375
"""Between a prefix's computation and the next request for it: what the writer needs, and a poll."""


@dataclass(frozen=True)
class Probe:
    """A request for a prefix that one node held: when it began, whether the prefix was computed before the fault, how
    long it took, whether it was placed on that node."""

    at: float
    old: bool
    seconds: float
    hit: bool


class ToyRouter(RouterCluster):
    def __init__(self, store: RedisStore) -> None:
        super().__init__(store, store, RouterMetrics())
        self.toy = self.pool(ModelName("toy"))


@dataclass
class RedisCluster:
    """`probes` since `disturbed` was called, at `began`; the deed was done at `over`."""

    routers: list[ToyRouter]
    workers: list[Worker]
    probes: list[Probe] = field(default_factory=list)
    began: float = 0.0
    over: float = 0.0
    _made: int = 0
    _rng: random.Random = field(default_factory=lambda: random.Random(7))

    async def disturbed(self, old: int, seconds: float, deed: Awaitable[object], enough: int = 0) -> None:
        """Have so many prefixes computed; then do the deed, and meanwhile and for so long ask for these and for new
        ones. `enough`: end as soon as all but one of the last so many requests, of those that began after the deed,
        found theirs; and routers forget then what they remember, which answers while Redis does not."""
        self._remember(True)
        known = [await self._computed() for _ in range(old)]
        await asyncio.sleep(SETTLES_S)
        known = [await self._follow(*one) for one in known]
        self.probes, self.began, self.over = [], time.monotonic(), math.inf
        doing = asyncio.ensure_future(deed)
        asked: list[asyncio.Task[Any]] = []
        while time.monotonic() < self.began + seconds or not doing.done():
            if doing.done() and self.over == math.inf:
                self.over = time.monotonic()
                self._remember(not enough)
            if enough and sum(probe.hit for probe in self.since(enough)) >= enough - 1:
                break
            while sum(not one.done() for one in asked) > MOST_AT_ONCE:  # noqa: ASYNC110 (a machine that is slow)
                await asyncio.sleep(0.02)
            asked.append(asyncio.create_task(self._new()))
            await asyncio.sleep(0.05)
            if known:
                asked.append(asyncio.create_task(self._follow(*known.pop(), old=True)))
            await asyncio.sleep(0.12)
        await doing
        await asyncio.gather(*asked)

    def since(self, last: int) -> list[Probe]:
        """The last so many requests of those that began after the deed."""
        return [probe for probe in self.probes if probe.at >= self.over][-last:]

    def back_after(self, of: bool | None = None) -> float:
        """Seconds from the fault to the end of the last request that missed its prefix; `of`: old prefixes or new."""
        missed = [
            probe.at + probe.seconds - self.began for probe in self.probes if not probe.hit and of in (None, probe.old)
        ]
        return max(missed, default=0.0)

    def hits(self, after: float = 0.0, of: bool | None = None) -> float:
        """Share of the requests that began so long after the fault."""
        asked = [probe.hit for probe in self.probes if probe.at >= self.began + after and of in (None, probe.old)]
        return sum(asked) / len(asked) if asked else float("nan")

    @property
    def slowest_s(self) -> float:
        return max(probe.seconds for probe in self.probes)

    def _remember(self, used: bool) -> None:
        for router in self.routers:
            prefixes = router._shared.prefixes
            prefixes._remembered = prefixes.note.__self__ if used else Remembered(0)  # type: ignore[attr-defined]

    async def _new(self) -> None:
        prefix, node = await self._computed()
        await asyncio.sleep(SETTLES_S)
        await self._follow(prefix, node)

    async def _computed(self) -> tuple[list[int], str]:
        """A prefix that nobody knew, and who holds it now."""
        prefix = self._rng.choices(range(VOCAB), k=PREFIX)
        return prefix, (await self._asked(prefix))[0]

    async def _follow(self, prefix: list[int], node: str, old: bool = False) -> tuple[list[int], str]:
        began = time.monotonic()
        went, cached = await self._asked(prefix + self._rng.choices(range(VOCAB), k=3))
        self.probes.append(Probe(began, old, time.monotonic() - began, went == node and cached >= PREFIX - 4))
        return prefix, node

    async def _asked(self, prompt: list[int]) -> tuple[str, int]:
        """By any router: routers let nodes take turns, so routers that did, too, would find what nobody told them. The
        decode node and the tokens reused there."""
        self._made += 1
        router = self._rng.choice(self.routers)
        now = time.monotonic()
        name = f"r{self._made}"
        work = Generate(SamplingParams(max_tokens=3, temperature=0.0))
        dispatch = router.toy.start(
            RequestSpec(RequestContext(name, arrival=now, deadline=now + 30), name, tuple(prompt), work)
        )
        tokens = [token async for output in dispatch for token in output.token_ids]
        assert tokens == expected(prompt, 3)
        assert dispatch.route is not None
        assert dispatch.route.decode is not None
        return dispatch.route.decode, dispatch.route.reuse.cached_len


@contextlib.asynccontextmanager
async def redis_cluster(url: str) -> AsyncIterator[RedisCluster]:
    """Nodes tell one and the same speed: what they learn of this machine makes one of them the better one for all."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(patch.object(RateMeter, "rates", Rates()))
        engines = [make_engine(BLOCKS) for _ in range(2)]
        stores = [RedisStore(url, "toy") for _ in range(4)]
        for store in stores:
            stack.push_async_callback(store.close)
        workers = [
            await stack.enter_async_context(worker("decode", engine, store=store, node_id=f"d{number}"))  # type: ignore[arg-type]
            for number, (engine, store) in enumerate(zip(engines, stores[2:], strict=True))
        ]
        routers = []
        for store in stores[:2]:
            routers.append(router := ToyRouter(store))
            await stack.enter_async_context(router)
        for router in routers:
            await until(lambda router=router: len(router.toy.usable("decode")) == 2)  # type: ignore[misc]
        yield RedisCluster(routers, workers)
        for each in workers:
            await each.settle()
