"""One run: right answers and their usual times first, then rounds of faults and what each left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.chaos.aftermath import aftermath
from tests.chaos.commands import tiny_model
from tests.chaos.deeds import Deeds
from tests.chaos.load import BODIES, Clients, Ledger, make_bodies, pauses
from tests.chaos.plan import make_plan
from tests.chaos.report import Run, Storm
from tests.chaos.shape import Shape
from tests.chaos.stage import Stage, stage
from tests.chaos.watch import Watch

TINY_VOCAB, DEMO_VOCAB = 512, 40000
AT_ONCE = 64
PHASES: dict[str, Callable[[int], bool] | None] = {
    "queue": None,
    "first token": lambda seen: seen >= 1,
    "decode": lambda seen: seen >= 6,
}
"""When clients leave: before anything came (after up to a second), at the first token, while the ship is under way, and
in the midst of decode."""
Tell = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """See __main__.py. seconds: of each round of faults; every_s: 0: no faults; bodies: different requests."""

    seed: int
    seconds: float
    streams: int
    every_s: float
    calm_s: float
    disconnects: int
    kinds: tuple[str, ...]
    rounds: int = 1
    bodies: int = BODIES


async def run(shape: Shape, settings: Settings, tell: Tell, found: Run | None = None) -> Run:
    """`found`, filled as things are seen, so that a run that is cancelled leaves what it knows. Raises AssertionError
    where the undisturbed cluster gives two answers to one request, or none."""
    found = found or Run(settings.seed, settings.streams)
    vocab = DEMO_VOCAB
    if shape.model == "tiny":
        shape, vocab = dataclasses.replace(shape, model=str(tiny_model(shape.home / "tiny"))), TINY_VOCAB
    tell(f"starting two routers, Valkey, {', '.join((*shape.roster.engines, *shape.roster.nodes))}")
    async with stage(shape) as cluster, AsyncExitStack() as stack:
        deeds: list[Deeds] = []
        clients = Clients(
            cluster.urls,
            make_bodies(settings.seed, vocab, settings.bodies, seeded=shape.seeded, share=shape.prompt_share),
            lambda router, began, ended: any(each.router_disturbed(router, began, ended) for each in deeds),
        )
        stack.push_async_callback(clients.close)
        tell("asking for the right answers")
        await clients.learn()
        tell(f"undisturbed, {settings.calm_s:.0f} s")
        calm = await _calm(clients, settings, 1)
        for asked in calm[0].asked:
            assert not asked.error, f"undisturbed, request {asked.which}: {asked.error}"
        clients.usual_s = usual(calm[0], len(clients.bodies))
        found.calm.append(calm)
        watch = Watch(cluster)
        watching = asyncio.create_task(watch.run())
        stack.callback(watching.cancel)
        for number in range(settings.rounds):
            deeds.append(Deeds(cluster, clients, settings.seed))
            await _round(cluster, clients, settings, number, deeds[-1], found, tell)
        found.late, found.samples = watch.late, watch.samples
        found.calm.append(await _calm(clients, settings, 2))
        if settings.disconnects:
            await _storms(cluster, clients, settings, found, tell)
        return found


def usual(calm: Ledger, count: int) -> dict[int, float]:
    """Median seconds to the first token, by request; of all, where one was never streamed."""
    firsts: dict[int, list[float]] = {}
    for asked in calm.asked:
        if asked.first_s:
            firsts.setdefault(asked.which, []).append(asked.first_s)
    every = [first for found in firsts.values() for first in found] or [0.0]
    return {which: median(firsts.get(which, every)) for which in range(count)}


async def _round(
    cluster: Stage, clients: Clients, settings: Settings, number: int, deeds: Deeds, found: Run, tell: Tell
) -> None:
    """Faults under load, then a moment without either, in which the books are read."""
    seed = settings.seed + 7919 * number
    plan = (
        make_plan(seed, settings.seconds, settings.every_s, settings.kinds, cluster.roster) if settings.every_s else []
    )
    tell(f"round {number + 1} of {settings.rounds}: {len(plan)} faults in {settings.seconds:.0f} s")
    began, stop = time.monotonic(), asyncio.Event()
    load = asyncio.create_task(clients.run(settings.streams, seed, stop))
    progress = asyncio.create_task(_progress(clients, deeds, began, settings.seconds, tell))
    try:
        await deeds.commit(plan, began)
        await asyncio.sleep(max(0.0, began + settings.seconds - time.monotonic()))
        ended = time.monotonic()
        stop.set()
        ledger = await load
    finally:
        progress.cancel()
        load.cancel()
    quiet = time.monotonic()
    await _all_back(cluster, tell)
    after = await aftermath(cluster, quiet if time.monotonic() - quiet < 0.5 else None)
    found.add(ledger, (began, ended), deeds, after)


async def _calm(clients: Clients, settings: Settings, number: int) -> tuple[Ledger, tuple[float, float]]:
    """What clients met while nobody disturbed them, and from when to when."""
    stop, began = asyncio.Event(), time.monotonic()
    asyncio.get_running_loop().call_later(settings.calm_s, stop.set)
    ledger = await clients.run(settings.streams, settings.seed + 1_000_000 * number, stop)
    return ledger, (began, min(began + settings.calm_s, time.monotonic()))


async def _all_back(cluster: Stage, tell: Tell) -> None:
    until = time.monotonic() + cluster.recovery_s
    while time.monotonic() < until and not all(map(cluster.ready, cluster.roster.nodes)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    try:
        await cluster.routers_see(len(cluster.roster.nodes), max(until - time.monotonic(), 1.0))
    except TimeoutError:
        tell("not all nodes came back")


async def _storms(cluster: Stage, clients: Clients, settings: Settings, found: Run, tell: Tell) -> None:
    """Clients leave in one phase, so many at a time, each as soon as another left; seconds until all is idle."""
    rng = random.Random(settings.seed)
    for phase, until in PHASES.items():
        tell(f"{settings.disconnects} clients leave: {phase}")
        clients.book, rounds = Ledger(), -(-settings.disconnects // AT_ONCE)
        for _ in range(rounds):
            await clients.leave(AT_ONCE, rng, until)
        left, refused, after = clients.book.left, clients.book.refused, await aftermath(cluster)
        if after.remains:
            tell(f"not idle: {after.remains}")
        found.disconnects[phase] = Storm(rounds * AT_ONCE, left, refused, after.idle_s)


async def _progress(clients: Clients, deeds: Deeds, began: float, seconds: float, tell: Tell) -> None:
    while True:
        await asyncio.sleep(10)
        book = clients.book
        wrong = [asked for asked in book.asked if asked.error]
        worst = max(pauses(book.asked), default=0.0)
        recent = sum(tokens for when, tokens in book.arrivals if when > time.monotonic() - 10) / 10
        tell(
            f"{time.monotonic() - began:.0f} of {seconds:.0f} s: {len(book.asked)} requests, "
            f"{len(deeds.done)} faults, {len(wrong)} errors, longest pause {worst:.1f} s, {recent:.0f} tokens/s"
            + (f"; last error: {wrong[-1].error[:100]}" if wrong else "")
        )
