"""Clients that know every right answer: they stream, compare each token, and note every gap that they see."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.asking import BROKEN, PATIENCE_S, Answered, Asking, Broken, Tokens, urls_from
from tests.chaos.plan import ROUTERS
from tests.chaos.shape import MODEL
from tests.chaos.watch import Late

RAMP_S = 2.0
"""Streams begin over this time, and what they get until then and a second longer is no measure."""
BODIES = 40
PREFIXES = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request met. Times are monotonic seconds. tokens: that came, whatever became of the answer; pause: (when
    it began, its seconds) of the longest gap, None where nothing was streamed;
    error: empty if the answer was right; router: whose router was disturbed meanwhile; tries: how often it was sent;
    began_anew: whether the routers had lost what was recorded of it; trace: its trace id."""

    which: int
    began: float
    ended: float
    tokens: int
    first_s: float
    pause: tuple[float, float] | None
    error: str = ""
    router: bool = False
    route: str = ""
    tries: int = 1
    began_anew: bool = False
    trace: str = ""


@dataclass
class Ledger:
    """What all clients met, and the arrivals of tokens: (when, how many)."""

    asked: list[Asked] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    left: int = 0
    refused: int = 0


def pauses(asked: Iterable[Asked], late: Sequence[Late] = ()) -> list[float]:
    """Seconds of the longest one of each that streamed, but for those in which the clients' own loop stood still."""
    return [each.pause[1] - _overlap(*each.pause, late) for each in asked if each.pause is not None]


def _overlap(began: float, seconds: float, late: Sequence[Late]) -> float:
    return sum(max(0.0, min(began + seconds, until) - max(began, since)) for since, until in late)


class Left(Exception):
    """A client has seen as much as it wanted."""


def make_bodies(
    seed: int, vocab: int, count: int = BODIES, *, seeded: bool = True, share: float = 1.0
) -> list[dict[str, Any]]:
    """Requests of mixed lengths, half of them behind a prefix that others share, greedy and with seeded sampling, if
    that is wanted. share: of the usual lengths."""
    rng = random.Random(seed)
    shared = [rng.choices(range(3, vocab), k=int(share * rng.choice((100, 200, 300)))) for _ in range(PREFIXES)]
    bodies = []
    for number in range(count):
        own = rng.choices(range(3, vocab), k=max(8, int(share * rng.choice((8, 30, 120, 300, 600)))))
        prompt = rng.choice(shared) + own if number % 2 else own
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": rng.choice((8, 40, 80, 160)),
            "return_token_ids": True,
        }
        body |= {"temperature": 0} if number % 4 < 2 or not seeded else {"temperature": 0.8, "seed": number}
        body |= {"ignore_eos": True} if number % 3 else {}
        body |= {"n": 2} if number % 10 == 9 else {}
        bodies.append(body)
    return bodies


class Clients:
    """Streams that begin again as soon as they end, at both routers in turn, until `stop` is set."""

    def __init__(self, urls: dict[str, str], bodies: Sequence[dict[str, Any]], disturbed: Callable[..., bool]) -> None:
        self.bodies, self.urls, self._disturbed = bodies, urls, disturbed
        self.expected: dict[int, Tokens] = {}
        self.usual_s: dict[int, float] = {}
        self.book = Ledger()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def learn(self) -> None:
        """The right answers, of a cluster that nobody disturbs: each request twice, with
        others beside it and then where it may reuse."""

        async def one(which: int) -> None:
            for router in ROUTERS:
                got, _, _, _ = await self.ask(router, self.bodies[which] | {"stream": True}, lambda count: None)
                right = self.expected.setdefault(which, got)
                assert got == right, f"request {which} has two answers on an undisturbed cluster"

        await asyncio.gather(*map(one, range(len(self.bodies))))

    async def run(self, streams: int, seed: int, stop: asyncio.Event) -> Ledger:
        """What these streams met; they end their last requests before it returns."""
        self.book = Ledger()
        await asyncio.gather(
            *(self._stream(number, random.Random(seed * 1000 + number), stop) for number in range(streams))
        )
        return self.book

    async def _stream(self, number: int, rng: random.Random, stop: asyncio.Event) -> None:
        router = ROUTERS[number % len(ROUTERS)]
        await asyncio.sleep(rng.uniform(0.0, RAMP_S))
        while not stop.is_set():
            which = rng.randrange(len(self.bodies))
            body = self.bodies[which] | {"stream": rng.random() < 0.85}
            if rng.random() < 0.5:
                body["cache_salt"] = str(rng.random())
            fine = await self._once(which, router, body)
            if not fine:
                router = ROUTERS[1 - ROUTERS.index(router)]
                await asyncio.sleep(0.1)

    async def _once(self, which: int, router: str, body: dict[str, Any]) -> bool:
        began, error = time.monotonic(), ""
        seen: list[tuple[float, int]] = []

        def count(tokens: int) -> None:
            seen.append((time.monotonic(), tokens))
            self.book.arrivals.append(seen[-1])

        asking = Asking(self._http, body, count)
        try:
            await self.answer(asking, router)
            if apart := difference(asking.tokens, self.expected[which]):
                error = f"changed: {apart}"
        except Answered as answered:
            error = str(answered)
        except (ValueError, KeyError) as broken:
            error = f"{type(broken).__name__}: {broken}"
        ended = time.monotonic()
        through = self._disturbed(router, began, ended)
        times = [began + self.usual_s.get(which, 0.0), *(when for when, _ in seen), ended]
        longest, at = max((after - before, before) for before, after in itertools.pairwise(times))
        pause, tokens = (at, longest) if body["stream"] else None, sum(made for _, made in seen)
        self.book.asked.append(
            Asked(
                which, began, ended, tokens, asking.first_s, pause, error, through, asking.route, asking.tries,
                asking.began_anew > 0, asking.trace,
            )
        )  # fmt: skip
        return not error

    async def answer(self, asking: Asking, router: str) -> None:
        """Bring a request to its end, from that router on. Raises Answered, ValueError."""
        await asking.until_answered(urls_from(self.urls, router))

    async def ask(
        self, router: str, body: dict[str, Any], count: Callable[[int], None]
    ) -> tuple[Tokens, float, float, str]:
        """Ask once: tokens, seconds to the first one, seconds in all, route.

        Raises Answered, httpx.HTTPError, ValueError."""
        asking = Asking(self._http, body, count)
        try:
            await asking.once(self.urls[router])
        except Broken as broken:
            raise Answered(str(broken)) from broken
        return asking.tokens, asking.first_s, time.monotonic() - asking.began, asking.route

    async def leave(self, number: int, rng: random.Random, until: Callable[[int], bool] | None = None) -> None:
        """Clients that go away: each begins a request and leaves after a moment, or once `until(tokens so far)`. The
        book counts those that left and those that were refused, or had to wait too long; the others were answered."""
        leaving = TimeoutError if until is None else Left

        async def one() -> None:
            router, body = (
                rng.choice(ROUTERS),
                rng.choice(self.bodies) | {"stream": True, "cache_salt": str(rng.random())},
            )
            seen = 0

            def count(tokens: int) -> None:
                nonlocal seen
                seen += tokens
                if until is not None and until(seen):
                    raise Left

            patience = PATIENCE_S if until is not None else rng.choice((0.003, 0.05, 0.3, 1.0)) * rng.random()
            try:
                async with asyncio.timeout(patience):
                    await self.ask(router, body, count)
            except leaving:
                self.book.left += 1
            except (Answered, *BROKEN, ValueError):
                self.book.refused += 1

        await asyncio.gather(*(one() for _ in range(number)))


def difference(got: Tokens, right: Tokens) -> str:
    """Where an answer parts from the right one; empty: nowhere."""
    for index, tokens in right.items():
        mine = got.get(index, ())
        if mine != tokens:
            pairs = enumerate(zip(mine, tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(tokens)))
            there = f"{mine[at : at + 4]} for {tokens[at : at + 4]}"
            return f"choice {index}: {len(mine)} of {len(tokens)} tokens, apart from {at} on: {there}"
    return "" if got.keys() == right.keys() else f"choices {sorted(got)} for {sorted(right)}"
