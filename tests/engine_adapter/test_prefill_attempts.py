"""Attempts of a prefill node: what routers and decode nodes are told, and which blocks stay pinned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, Prefilled
from kvferry.engine_adapter.handover_sender import BlockFacts, HandoverSender, PinnedBlocks
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.engine_adapter.prefill_attempts import PrefillAttempt, PrefillAttempts
from kvferry.protocol.errors import (
    Cancelled,
    Draining,
    Fenced,
    InvalidRequest,
    KvferryError,
    NodeDown,
    Overloaded,
    TransferFailed,
)
from kvferry.protocol.handover_messages import Handover, HandoverOffer
from kvferry.protocol.messages import (
    AttemptFailed,
    CancelRequest,
    DecodeTarget,
    FirstToken,
    Job,
    PrefillRequest,
    ShipDone,
)
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import unpack
from kvferry.protocol.work import Generate
from tests.waiting import until

TARGET = DecodeTarget("d", 7, "http://127.0.0.1:1", "f")
KEPT = ("greedy_resume", "greedy_replay")
PROMPT = tuple(range(1, 41))


def job(delivered: tuple[int, ...] = (), max_tokens: int = 8, deadline_s: float = 60.0, **params: Any) -> Job:
    work = Generate(SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params}))
    return Job("r", 1, PROMPT + delivered, len(PROMPT), work, "router", deadline_s=deadline_s)


class ScriptedEngine:
    """Answers each prefill with token 50, once `computed` is set."""

    media = None

    def __init__(self, delta: EngineDelta, reference: str) -> None:
        self.calls, self.dropped, self.plain = list[EngineCall](), 0, list[EngineCall]()
        self.delta, self.reference, self.computed = delta, reference, asyncio.Event()
        self.error: KvferryError | None = None

    def check(self, job: Job) -> None:
        """Everything can be done."""

    async def prefill(self, call: EngineCall) -> Prefilled:
        self.calls.append(call)
        try:
            await self.computed.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        if self.error:
            raise self.error
        return Prefilled(replace(self.delta), self.reference)

    async def generate(self, call: EngineCall, deliver: Callable[[EngineDelta], None]) -> None:
        self.plain.append(call)
        deliver(EngineDelta((50,), None, "length", 16))


@dataclass
class Decode:
    """A decode node's adapter as its client sees it."""

    offers: list[HandoverOffer] = field(default_factory=list)
    handovers: list[tuple[Handover, float]] = field(default_factory=list)
    refuses_offer: KvferryError | None = None
    refuses: KvferryError | None = None
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: int = 0

    async def offer(self, target: DecodeTarget, offer: HandoverOffer) -> str:
        self.offers.append(offer)
        if self.refuses_offer:
            raise self.refuses_offer
        return "ticket"

    async def hand_over(self, target: DecodeTarget, handover: Handover, within_s: float) -> None:
        self.handovers.append((handover, within_s))
        if self.refuses:
            raise self.refuses
        try:
            await self.landed.wait()
        except asyncio.CancelledError:
            self.dropped += 1
            raise


class Bench:
    def __init__(
        self, *, reference: str = '{"blocks":1}', delta: EngineDelta | None = None, kept: tuple[str, ...] = KEPT,
        suspect: Callable[[KvferryError], Awaitable[None]] | None = None, suspended_s: Callable[[], float] = float,
    ) -> None:  # fmt: skip
        self.engine, self.decode = ScriptedEngine(delta or EngineDelta((50,), None, "length", 16), reference), Decode()
        engine: Any = self.engine
        client: Any = self.decode
        self.outcomes: list[str] = []
        self.sender = HandoverSender(client, ("p", 3), BlockFacts(16, 1600, 10.0), LearnedRates())
        self.attempts = PrefillAttempts(
            engine, self.sender, kept, {"id": "lora"}, suspect=suspect or well, counted=self.outcomes.append,
            suspended_s=suspended_s,
        )  # fmt: skip

    async def told(self, attempt: PrefillAttempt) -> list[Any]:
        return [unpack(each) async for each in attempt.messages()]

    async def answer(self, work: Job, target: DecodeTarget | None = TARGET) -> list[Any]:
        attempt = self.attempts.start(PrefillRequest(work, target))
        self.engine.computed.set()
        self.decode.landed.set()
        return await self.told(attempt)


async def well(error: KvferryError) -> None:
    """The engine is well after each error."""


async def test_the_first_token_goes_out_at_once_and_the_ship_is_done_when_the_blocks_have_come() -> None:
    bench = Bench()
    attempt = bench.attempts.start(PrefillRequest(job(), TARGET))
    await until(lambda: bench.decode.offers)
    assert bench.decode.offers == [HandoverOffer("r", 1, ("p", 3), 7)]
    assert bench.attempts.waiting_tokens == len(PROMPT)
    bench.engine.computed.set()
    first = unpack(await anext(messages := attempt.messages()))
    assert isinstance(first, FirstToken)
    assert (first.delta.index, first.delta.token_ids, first.delta.finish_reason) == (0, (50,), None)
    assert first.delta.reuse is not None
    assert (first.delta.reuse.reused_prefill, first.delta.reuse.computed) == (16, 24)
    await until(lambda: bench.decode.handovers)
    assert (bench.attempts.pinned.blocks, bench.attempts.waiting_tokens, bench.attempts.running) == (3, 0, 1)
    bench.decode.landed.set()
    done = [unpack(each) async for each in messages]
    assert [(type(each), each.blocks, each.bytes) for each in done] == [(ShipDone, 3, 4800)]
    assert (bench.attempts.pinned.blocks, bench.outcomes) == (0, ["done"])
    ((handover, within_s),) = bench.decode.handovers
    assert (handover.reference, handover.first_token, handover.length) == ('{"blocks":1}', 50, len(PROMPT))
    assert handover.age_s <= 0
    assert 9 < within_s <= 10


async def test_the_decode_engine_gets_exactly_the_tokens_of_the_prefill() -> None:
    bench = Bench(delta=EngineDelta((52,), None, "length", 0))
    told = await bench.answer(job((50, 51)))
    assert bench.engine.calls[0].token_ids == (*PROMPT, 50, 51)
    assert bench.decode.handovers[0][0].length == len(PROMPT) + 2
    assert told[0].delta.index == 2


async def test_a_replay_computes_the_prompt_alone_and_tells_nothing_that_was_delivered() -> None:
    bench = Bench()
    told = await bench.answer(job((50, 51), frequency_penalty=0.5))
    assert bench.engine.calls[0].token_ids == PROMPT
    assert bench.decode.handovers[0][0].length == len(PROMPT)
    assert [type(each) for each in told] == [ShipDone]


async def test_a_replay_that_draws_another_token_fails() -> None:
    bench = Bench()
    told = await bench.answer(job((49, 51), frequency_penalty=0.5))
    assert [each.code for each in told] == ["replay_differs"]
    assert bench.decode.handovers == []


async def test_an_output_that_ends_with_its_first_token_is_not_handed_over() -> None:
    bench = Bench(delta=EngineDelta((50,), None, "stop", 0))
    told = await bench.answer(job(stop_token_ids=(50,)))
    assert [(each.delta.finish_reason, each.delta.stop_token) for each in told] == [("stop", 50)]
    assert bench.decode.handovers == []
    assert bench.attempts.pinned.blocks == 3  # nobody will fetch them: they stay until the lease is over


async def test_without_a_target_it_is_a_plain_call() -> None:
    bench = Bench()
    told = await bench.answer(job(max_tokens=1), None)
    assert [(type(each), each.delta.finish_reason) for each in told] == [(FirstToken, "length")]
    assert (len(bench.engine.plain), bench.engine.calls, bench.decode.offers) == (1, [], [])
    with pytest.raises(InvalidRequest, match="max_tokens 1"):
        bench.attempts.start(PrefillRequest(job(), None))


async def test_a_decode_node_that_refuses_spares_the_prompt() -> None:
    bench = Bench()
    bench.decode.refuses_offer = Draining("it drains")
    told = await bench.told(bench.attempts.start(PrefillRequest(job(), TARGET)))
    assert [each.code for each in told] == ["grant_refused"]
    assert bench.engine.dropped == 1
    assert bench.attempts.pinned.blocks == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Fenced("another epoch"), "fenced"),
        (NodeDown("reset"), "node_lost"),
        (TransferFailed("old"), "transfer_failed"),
        (Overloaded("full"), "grant_refused"),
        (InvalidRequest("no"), "grant_refused"),
        (KvferryError("a bug"), "grant_refused"),
    ],
)
async def test_who_is_at_fault_for_a_failed_handover_can_be_told_by_its_code(error: KvferryError, code: str) -> None:
    bench = Bench()
    bench.decode.refuses = error
    told = await bench.answer(job())
    assert [getattr(each, "code", "first") for each in told] == ["first", code]
    assert bench.attempts.pinned.blocks == 3
    assert bench.outcomes == ["failed"]


async def test_an_engine_that_gives_no_reference_fails_the_transfer() -> None:
    bench = Bench(reference="")
    told = await bench.answer(job())
    assert told[1].code == "transfer_failed"
    assert (bench.decode.handovers, bench.attempts.pinned.blocks) == ([], 0)


async def test_a_cancel_reaches_the_engine_and_the_decode_node() -> None:
    bench = Bench()
    first = bench.attempts.start(PrefillRequest(job(), TARGET))
    await until(lambda: bench.engine.calls)
    bench.attempts.cancel(CancelRequest("r", 1))
    assert [each.code for each in await bench.told(first)] == ["cancelled"]
    assert (bench.engine.dropped, bench.attempts.pinned.blocks) == (1, 0)
    with pytest.raises(Cancelled):
        bench.attempts.start(PrefillRequest(job(), TARGET))
    bench.engine.computed.set()
    second = bench.attempts.start(PrefillRequest(replace(job(), attempt=2), TARGET))
    await until(lambda: bench.decode.handovers)
    bench.attempts.router_lost("router")
    assert [type(each) for each in await bench.told(second)] == [FirstToken, AttemptFailed]
    assert (bench.decode.dropped, bench.attempts.pinned.blocks) == (1, 3)
    assert bench.outcomes == ["cancelled", "cancelled"]


async def test_nothing_is_told_of_prompts_on_an_engine_that_is_gone() -> None:
    asked: list[KvferryError] = []

    async def gone(error: KvferryError) -> None:
        asked.append(error)
        await asyncio.Event().wait()

    bench = Bench(suspect=gone)
    bench.engine.error = NodeDown("reset")
    bench.engine.computed.set()
    attempt = bench.attempts.start(PrefillRequest(job(), TARGET))
    await until(lambda: asked)
    await asyncio.sleep(0.02)
    assert attempt.outbox.empty()
    bench.attempts.abandon(attempt)


async def test_time_for_which_this_process_was_suspended_counts_as_age() -> None:
    """The engine's answer may have lain in the socket for as long."""
    told = iter((2.0, 6.5))
    bench = Bench(suspended_s=lambda: next(told))
    await bench.answer(job())
    ((handover, within_s),) = bench.decode.handovers
    assert 4.0 < handover.age_s <= 4.5
    assert within_s <= 5.5


async def test_an_engine_that_does_not_repeat_its_tokens_computes_for_no_other() -> None:
    bench = Bench()
    with pytest.raises(Overloaded, match="repeat"):
        bench.attempts.start(PrefillRequest(job(temperature=1.0), TARGET))


async def test_a_deadline_ends_the_attempt() -> None:
    bench = Bench()
    told = await bench.told(bench.attempts.start(PrefillRequest(job(deadline_s=0.05), TARGET)))
    assert [each.code for each in told] == ["deadline_exceeded"]
    assert bench.engine.dropped == 1


def test_pinned_blocks_are_forgotten_when_they_are_fetched_or_their_lease_is_over() -> None:
    now = [time.monotonic()]
    pinned = PinnedBlocks(5.0, lambda: now[0])
    first, _ = pinned.pin(3), pinned.pin(4)
    now[0] += 2
    pinned.pin(10)
    assert (pinned.blocks, pinned.prompts) == (17, 3)
    pinned.fetched(first)
    pinned.fetched(first)
    assert (pinned.blocks, pinned.prompts) == (14, 2)
    now[0] += 3
    assert (pinned.blocks, pinned.prompts) == (10, 1)
    now[0] += 2
    assert (pinned.blocks, pinned.prompts) == (0, 0)
