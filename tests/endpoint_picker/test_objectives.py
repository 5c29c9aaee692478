"""Latency targets and flows that the gateway's headers name: where requests go, what is refused, what is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc import v3

from kvferry.protocol.lease import Load, Rates
from kvferry.protocol.sessions import session_name
from kvferry.router.tenants.scheduler_slots import SchedulerSlots
from tests.endpoint_picker.gateway import House, at, chat, engine
from tests.waiting import until

RATES = Rates(1000.0, 0.02, alone_s=0.02, stream_s=0.01)
"""Each further stream adds 10 ms between the tokens of all."""
QUEUE = Load(waiting_requests=40, waiting_tokens=5000, free_blocks=1000, total_blocks=1000)
"""Five seconds of work at these rates."""
SPELLINGS = ("x-slo", "x-llm-d-slo")


def count(house: House, name: str, outcome: str) -> float:
    return (
        house.metrics.registry.get_sample_value(f"kvferry_{name}_targets_total", {"tenant": "", "outcome": outcome})
        or 0
    )


def words(number: int) -> dict[str, Any]:
    return chat(f"{number} something else")


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_a_stream_goes_where_its_target_between_tokens_is_met(spelling: str) -> None:
    fast, headers = engine("e1", rates=RATES), {f"{spelling}-tpot-ms": "25"}
    async with House(fast, engine("e2", rates=RATES), queue_timeout=60.0) as house:
        answers = [await house.ask(words(n), headers=headers) for n in range(2)]
        assert {answer.endpoints[0] for answer in answers} == {at("e1"), at("e2")}
        async with asyncio.timeout(5):
            refused = await house.ask(words(2), headers=headers)
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert "time between tokens" in refused.error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert count(house, "itl", "rejected") == 1
        answers.append(await house.ask(words(3)))
        answers.append(
            await house.ask(
                words(
                    4,
                )
                | {"service_tier": "flex"},
                headers=headers,
            )
        )
        for answer in answers:
            assert answer.endpoints
            await answer.stream.respond()


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_a_request_that_would_begin_too_late_is_refused_at_once(spelling: str) -> None:
    async with House(engine("e1", rates=RATES, load=QUEUE), queue_timeout=60.0) as house:
        async with asyncio.timeout(5):
            refused = await house.ask(chat(), headers={f"{spelling}-ttft-ms": "800.5"})
        assert refused.status == 429
        assert "before its deadline or its target" in refused.error["message"]
        assert count(house, "ttft", "rejected") == 1
        await house.complete(chat(), headers={f"{spelling}-ttft-ms": "0"})
        await house.complete(chat(), headers={f"{spelling}-ttft-ms": "600000"})
        assert count(house, "ttft", "met") == 1


@pytest.mark.parametrize("value", ["", "fast", "-5", "nan", "1e3", "5" * 40])
async def test_a_target_that_is_no_number_is_refused(value: str) -> None:
    async with House(engine("e1")) as house:
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
            refused = await house.ask(chat(), headers={name: value})
            assert (refused.status, refused.error["param"]) == (400, name)


async def test_the_time_between_tokens_is_measured() -> None:
    event = b'data: {"choices": []}\n\n'
    async with House(engine("e1")) as house:
        for target, outcome in (("60000", "met"), ("1", "missed")):
            answer = await house.ask(chat(), headers={"x-slo-tpot-ms": target})
            await answer.stream.begin()
            for _ in range(2):
                await answer.stream.send(response_body=v3.HttpBody(event, end_of_stream=False))
                await answer.stream.read()
                await asyncio.sleep(0.01)
            await answer.stream.call.done_writing()
            await until(lambda outcome=outcome: count(house, "itl", outcome))
        whole = await house.ask(chat(), headers={"x-slo-tpot-ms": "1"})
        await whole.stream.respond(b'{"usage": {"completion_tokens": 50}}')
        assert count(house, "itl", "met") + count(house, "itl", "missed") == 2, "of a whole answer it is unknown"


@pytest.mark.parametrize("name", ["x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"])
async def test_requests_of_a_flow_are_a_session_in_the_fair_queue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, take = [], SchedulerSlots.take

    async def noted(slots: SchedulerSlots, tenant: Any, call: Any, size: Any) -> Any:
        sessions.append(call.session)
        return await take(slots, tenant, call, size)

    monkeypatch.setattr(SchedulerSlots, "take", noted)
    async with House(engine("e1")) as house:
        await house.complete(chat(), headers={name: "team-a"})
        await house.complete(chat(), headers={name: "team-a", "x-session-id": "one"})
        await house.complete(chat())
    assert sessions == [session_name("", "team-a"), session_name("", "one"), ""]
