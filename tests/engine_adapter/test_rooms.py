"""Rooms of SGLang: how they are drawn, what each leg is asked, and that a leg which ends early is aborted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, EngineFacts
from kvferry.engine_adapter.engines.sglang import SglangEngine
from kvferry.engine_adapter.engines.sglang_rooms import NO_DECODE_HOST, ROOM_BITS, Rooms
from kvferry.engine_adapter.handover_sender import BlockFacts, HandoverSender
from kvferry.engine_adapter.identity import require_role
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.engine_adapter.room_prefills import RoomPrefills
from kvferry.protocol.errors import BlocksCorrupt, ConfigError, KvferryError, NodeLost, Overloaded, StepFailed
from kvferry.protocol.handover_messages import IN_ROOM, Handover, HandoverOffer, RoomFirstToken
from kvferry.protocol.messages import AttemptFailed, DecodeTarget, FirstToken, Job, PrefillRequest, ShipDone
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import unpack
from kvferry.protocol.work import Generate
from tests.waiting import until

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, eos_token_ids=(2,))
CALL = EngineCall("r-0-1", (5, 6, 7), PARAMS)
TARGET = DecodeTarget("d", 7, "http://127.0.0.1:1", "f")
PROMPT = tuple(range(100, 140))


class Http:
    """A server that answers /generate with `told`, or never; notes what it is asked."""

    def __init__(self, told: dict[str, Any] | None, info: dict[str, Any] | None = None) -> None:
        self.told, self.info, self.asked = told, info or {}, list[tuple[str, Any]]()
        self.host = "127.0.0.1"

    async def get(self, path: str) -> Any:
        return self.info if path == "/server_info" else {"data": [{"id": "toy", "max_model_len": 64}]}

    async def text(self, path: str) -> str:
        return ""

    async def post(self, path: str, body: Any, silence_s: float | None = 10.0) -> Any:
        self.asked.append((path, body))
        if path == "/generate" and self.told is None:
            await asyncio.Event().wait()
        return self.told


def answer(token: int | None, reason: dict[str, Any]) -> dict[str, Any]:
    return {"output_ids": [] if token is None else [token], "meta_info": {"finish_reason": reason, "cached_tokens": 3}}


async def engine_of(mode: str, told: dict[str, Any] | None = None) -> tuple[SglangEngine, Http]:
    http = Http(told, {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001, "page_size": 16})
    engine = SglangEngine(http)  # type: ignore[arg-type]
    facts = await engine.facts()
    assert (facts.kv_transfer, facts.kv_role) == (("rooms", mode) if mode != "null" else ("", ""))
    return engine, http


def test_rooms_are_drawn_for_one_use_and_name_the_bootstrap_service():
    rooms = Rooms({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001})
    drawn = [json.loads(rooms.draw("10.0.0.7")) for _ in range(1000)]
    assert {(each["bootstrap_host"], each["bootstrap_port"]) for each in drawn} == {("10.0.0.7", 9001)}
    assert len({each["bootstrap_room"] for each in drawn}) == 1000
    assert all(0 <= each["bootstrap_room"] < 2**ROOM_BITS for each in drawn)
    assert json.loads(rooms.draw(""))["bootstrap_host"] == NO_DECODE_HOST
    for mode in ("decode", "null"):
        with pytest.raises(ConfigError):
            Rooms({"disaggregation_mode": mode}).draw("10.0.0.7")


@pytest.mark.parametrize(
    ("kv_role", "role", "fits"),
    [("", "decode", True), ("prefill", "prefill", True), ("decode", "decode", True), ("", "prefill", False),
     ("prefill", "decode", False), ("decode", "prefill", False)],
)  # fmt: skip
def test_an_engine_with_half_of_the_work_has_one_role(kv_role: str, role: str, fits: bool):
    facts = EngineFacts("sglang", "0.5.23", "1", "toy", ("toy",), 64, 16, kv_role=kv_role)
    if fits:
        require_role(facts, role)
        return
    with pytest.raises(ConfigError) as refused:
        require_role(facts, role)
    assert refused.value.param == "role"


async def test_a_prefill_leg_asks_for_one_token_in_its_room():
    engine, http = await engine_of("prefill", answer(50, {"type": "length", "length": 0}))
    deltas: list[EngineDelta] = []
    await engine.generate(CALL, deltas.append)
    assert [(delta.token_ids, delta.finish_reason, delta.cached_tokens) for delta in deltas] == [((50,), "length", 3)]
    ((path, body),) = http.asked
    assert (path, body["bootstrap_host"], body["stream"]) == ("/generate", NO_DECODE_HOST, False)
    assert (body["sampling_params"]["max_new_tokens"], body["sampling_params"]["min_new_tokens"]) == (1, 1)


async def test_a_leg_that_is_cancelled_or_aborted_is_aborted_at_the_server():
    engine, http = await engine_of("prefill")
    leg = asyncio.create_task(engine.prefill_leg(EngineCall("r-0-2", (5,), PARAMS, reference=engine.room("h"))))
    await until(lambda: bool(http.asked))
    leg.cancel()
    await until(lambda: ("/abort_request", {"rid": "r-0-2"}) in http.asked)
    http.told = answer(None, {"type": "abort", "message": "no decode server"})
    with pytest.raises(StepFailed, match="no decode server"):
        await engine.generate(EngineCall("r-0-3", (5,), PARAMS, reference=engine.room("h")), lambda delta: None)
    await until(lambda: ("/abort_request", {"rid": "r-0-3"}) in http.asked)


async def test_an_engine_that_only_decodes_takes_no_prompt_that_nobody_computed():
    engine, http = await engine_of("decode")
    with pytest.raises(Overloaded, match="only decodes"):
        await engine.generate(CALL, lambda delta: None)
    assert http.asked == []


class Decode:
    """A decode node's adapter as its client sees it: it tells this first token, fails, or never answers."""

    def __init__(self, told: int | KvferryError | None) -> None:
        self.told, self.handovers, self.left = told, list[Handover](), 0

    async def offer(self, target: DecodeTarget, offer: HandoverOffer) -> str:
        return "ticket"

    async def hand_over(self, target: DecodeTarget, handover: Handover, within_s: float) -> RoomFirstToken:
        self.handovers.append(handover)
        if isinstance(self.told, KvferryError):
            raise self.told
        try:
            await asyncio.Event().wait() if self.told is None else None
        except asyncio.CancelledError:
            self.left += 1
            raise
        return RoomFirstToken(self.told or 0)


async def prefilled(http_told: dict[str, Any] | None, decode: Decode, prompt: int = 40) -> tuple[list[Any], Http]:
    engine, http = await engine_of("prefill", http_told)
    client: Any = decode
    sender = HandoverSender(client, ("p", 3), BlockFacts(16, 1600, 10.0), LearnedRates())

    async def well(error: KvferryError) -> None:
        """The engine is well."""

    attempts = RoomPrefills(engine, sender, "10.0.0.7", {}, suspect=well)
    job = Job("r", 1, PROMPT, prompt, Generate(PARAMS), "router")
    attempt = attempts.start(PrefillRequest(job, TARGET))
    told = [unpack(each) async for each in attempt.messages()]
    assert attempts.pinned.blocks == 0
    return told, http


LENGTH = {"type": "length", "length": 0}


async def test_both_legs_get_the_same_room_and_the_router_the_first_token():
    decode = Decode(50)
    (first, shipped), http = await prefilled(answer(50, LENGTH), decode)
    assert isinstance(first, FirstToken)
    assert (first.delta.token_ids, first.delta.finish_reason, first.delta.index) == ((50,), None, 0)
    assert isinstance(shipped, ShipDone)
    (handover,) = decode.handovers
    assert (handover.first_token, handover.length) == (IN_ROOM, len(PROMPT))
    room = json.loads(handover.reference)
    ((_, body),) = http.asked
    assert {name: body[name] for name in room} == room
    assert room["bootstrap_host"] == "10.0.0.7"


async def test_another_first_token_is_another_prompts():
    (failed,), _ = await prefilled(answer(50, LENGTH), Decode(51))
    assert isinstance(failed, AttemptFailed)
    assert failed.code == BlocksCorrupt.code


async def test_if_the_decode_leg_fails_the_prefill_leg_is_aborted():
    (failed,), http = await prefilled(None, Decode(NodeLost("d is silent")))
    assert failed.code == NodeLost.code
    await until(lambda: [path for path, _ in http.asked][-1:] == ["/abort_request"])


async def test_if_the_prefill_leg_fails_the_decode_node_is_left():
    decode = Decode(None)
    (failed,), _ = await prefilled(answer(None, {"type": "abort", "message": "out of memory"}), decode)
    assert failed.code == StepFailed.code
    assert decode.left == 1


async def test_a_prompt_that_ends_with_its_first_token_ends_there():
    """A prefill server looks at no stop tokens: it always says `length`."""
    params = SamplingParams(temperature=0.0, max_tokens=8, eos_token_ids=(2,))
    engine, _ = await engine_of("prefill", answer(2, LENGTH))
    client: Any = Decode(2)
    sender = HandoverSender(client, ("p", 3), BlockFacts(16, 1600, 10.0), LearnedRates())
    attempts = RoomPrefills(engine, sender, "h", {}, suspect=None)  # type: ignore[arg-type]
    job = Job("r", 1, PROMPT, len(PROMPT), Generate(params), "router")
    attempt = attempts.start(PrefillRequest(job, TARGET))
    (first,) = [unpack(each) async for each in attempt.messages()]
    assert (first.delta.finish_reason, first.delta.stop_token) == ("stop", 2)
