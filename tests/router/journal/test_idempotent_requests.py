"""Requests that clients send again under the same Idempotency-Key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from kvferry.cluster_state.memory_journals import MemoryJournals
from kvferry.protocol.errors import NoNodes, Overloaded
from tests.api_parts import FakeCluster, says
from tests.router_pair import CHAT, LEASE_S, Router, Shared, text_of

TEXT = "One two three four five six seven eight nine ten. " * 3
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 200}


def shared(gap_s: float = 0.005) -> Shared:
    return Shared(FakeCluster(says(TEXT), gap_s=gap_s))


async def test_the_same_request_at_two_routers_is_computed_once() -> None:
    together = shared()
    async with Router(together) as first, Router(together) as second:
        exchanges = [first.post(CHAT, BODY, idempotency_key="k")]
        await asyncio.sleep(0.05)
        exchanges += [router.post(CHAT, BODY, idempotency_key="k") for router in (first, second)]
        answers = [(await exchange.whole()).json() for exchange in exchanges]
        assert len(together.cluster.dispatches) == 1
        assert answers[0]["choices"][0]["message"]["content"].startswith(TEXT[:60])
        assert answers[0] == answers[1] == answers[2]
        again = await second.post(CHAT, BODY, idempotency_key="k").whole()
        assert again.json() == answers[0], "after the end"
        assert len(together.cluster.dispatches) == 1
        assert second.count("kvferry_answers_resumed_total") == 2
        assert second.count("kvferry_output_tokens_total", model="smollm2") == 0, "counted where it was computed"


async def test_a_follower_takes_over_when_the_first_router_dies() -> None:
    together = shared(0.02)
    async with Router(together) as first, Router(together) as second:
        first.post(CHAT, BODY, idempotency_key="k")
        await asyncio.sleep(0.4)
        follower = second.post(CHAT, BODY, idempotency_key="k")
        await asyncio.sleep(0.2)
        first.kill()
        answer = (await follower.whole()).json()
        assert answer["choices"][0]["message"]["content"].startswith(TEXT[:60])
        assert len(together.cluster.dispatches) == 2
        delivered = together.cluster.dispatches[1].spec.delivered
        assert delivered is not None
        assert len(delivered.token_ids) >= 5
        assert answer["usage"]["completion_tokens"] > 20


async def test_a_stream_is_sent_again_from_the_start_or_behind_the_last_event() -> None:
    together = shared()
    body = {**BODY, "stream": True}
    async with Router(together) as first, Router(together) as second:
        exchange = await first.post(CHAT, body, idempotency_key="k").until(10)
        await exchange.leave()
        whole = await second.post(CHAT, body, idempotency_key="k").whole()
        rest = await first.post(CHAT, body, idempotency_key="k", last_event_id=exchange.last_id).whole()
        assert text_of(whole.events)[0].startswith(TEXT[:60])
        assert text_of([*exchange.events, *rest.events]) == text_of(whole.events)


async def test_another_request_under_the_same_key_is_refused() -> None:
    async with Router(shared(0.0)) as router:
        await router.post(CHAT, BODY, idempotency_key="k").whole()
        for path, body in ((CHAT, {**BODY, "max_tokens": 9}), ("/v1/completions", {"prompt": "x"})):
            refused = await router.post(path, body, idempotency_key="k").whole()
            assert refused.status == 422
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("Idempotency-Key", "idempotency_key_reused")
        for key in ("k" * 256, "umläut"):
            refused = await router.post(CHAT, BODY, idempotency_key=key).whole()
            assert refused.status == 400
            assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_a_request_that_failed_before_its_first_token_is_tried_anew() -> None:
    together = shared(0.0)
    async with Router(together) as router:
        together.cluster.refusal = Overloaded("full")
        assert (await router.post(CHAT, BODY, idempotency_key="k").whole()).status == 429
        together.cluster.refusal = None
        await asyncio.sleep(0.1)
        assert (await router.post(CHAT, BODY, idempotency_key="k").whole()).status == 200
        invalid = {**BODY, "temperature": -1}
        assert (await router.post(CHAT, invalid, idempotency_key="other").whole()).status == 400


async def test_who_waits_for_a_request_that_fails_is_told_to_send_it_again() -> None:
    together = Shared(FakeCluster(lambda spec: [NoNodes("none is left")], gap_s=0.5))
    async with Router(together) as first, Router(together) as second:
        exchanges = [first.post(CHAT, BODY, idempotency_key="k")]
        await asyncio.sleep(0.1)
        exchanges.append(second.post(CHAT, BODY, idempotency_key="k"))
        assert [(await exchange.whole()).status for exchange in exchanges] == [503, 503]
        assert len(together.cluster.dispatches) == 1
        together.cluster.script, together.cluster.gap_s = says(TEXT), 0.0
        assert (await second.post(CHAT, BODY, idempotency_key="k").whole()).status == 200


async def test_store_false_stays_in_its_process() -> None:
    together, body = shared(0.0), {**BODY, "store": False}
    async with Router(together) as first, Router(together) as second:
        answers = [(await first.post(CHAT, body, idempotency_key="k").whole()).json() for _ in range(2)]
        assert answers[0] == answers[1]
        assert len(together.cluster.dispatches) == 1
        await second.post(CHAT, body, idempotency_key="k").whole()
        assert len(together.cluster.dispatches) == 2
        assert together.journals._records.get("", {}) == {}


async def test_without_the_store_requests_run_and_resumption_is_lost() -> None:
    together = shared(0.01)
    async with Router(together) as first, Router(together) as second:
        stream = {**BODY, "stream": True}
        exchange = await first.post(CHAT, stream, accept="text/event-stream").until(10)
        together.journals.available = together.leases.available = False
        keyed = await second.post(CHAT, BODY, idempotency_key="k").whole()
        assert keyed.status == 200
        refused = await second.post(CHAT, stream, last_event_id=exchange.last_id).whole()
        assert refused.status == 503
        assert "resumed now" in refused.json()["error"]["message"]
        assert (await exchange.whole()).events[-1].endswith("[DONE]")
        assert second.count("kvferry_journal_failures_total", reason="store") >= 1
        together.journals.available = together.leases.available = True
        await asyncio.sleep(0.6)
        rest = await second.post(CHAT, stream, last_event_id=exchange.last_id).whole()
        assert rest.status == 200, "what was delivered meanwhile is recorded later"


async def test_what_is_too_large_runs_without_a_journal() -> None:
    together = shared(0.0)
    async with Router(together, resume_record_kib=1) as router:
        body = {**BODY, "messages": [{"role": "user", "content": "Count. " * 300}]}
        assert (await router.post(CHAT, body, idempotency_key="k").whole()).status == 200
        assert (await router.post(CHAT, {**body, "stream": True}, accept="text/event-stream").whole()).status == 200
        assert router.count("kvferry_journal_failures_total", reason="too_large") == 2
        assert router.count("kvferry_journals_open") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_whose_request_was_claimed_stops_in_silence(stream: bool) -> None:
    together = shared(0.05)
    async with Router(together) as first, Router(together) as second:
        frozen = first.post(CHAT, {**BODY, "stream": stream}, idempotency_key="k")
        await asyncio.sleep(0.4)
        await together.leases.withdraw(first.ownership.owner)
        follower = second.post(CHAT, {**BODY, "stream": stream}, idempotency_key="k")
        await asyncio.sleep(LEASE_S + 0.4)
        await frozen.whole()
        assert together.cluster.dispatches[0].cancelled.is_set()
        assert b"error" not in frozen.data
        assert (await follower.whole()).status == 200


class SlowJournals:
    """Journals whose calls are answered late: what was asked is done meanwhile."""

    def __init__(self, journals: MemoryJournals, wait_s: float) -> None:
        self._journals, self._wait_s = journals, wait_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journals, name)

    async def open(self, *args: Any, **named: Any) -> str:
        return await self._late(self._journals.open(*args, **named))

    async def claim(self, *args: Any, **named: Any) -> bool:
        return await self._late(self._journals.claim(*args, **named))

    async def _late(self, call: Awaitable[Any]) -> Any:
        answer = await call
        await asyncio.sleep(self._wait_s)
        return answer


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_while_its_request_is_recorded_may_come_back_at_another_router(begun: bool) -> None:
    """The other router followed the first one, which lived and did not work on it, for a minute."""
    together = shared()
    slow: Any = SlowJournals(together.journals, 0.3)
    async with Router(together, journals=slow) as first, Router(together) as second:
        if begun:
            exchange = await second.post(CHAT, BODY | {"stream": True}, idempotency_key="k").until(5)
            await exchange.leave()
            await asyncio.sleep(0.1)
        exchange = first.post(CHAT, BODY | {"stream": True}, idempotency_key="k")
        await asyncio.sleep(0.5 if begun else 0.1)
        await exchange.leave()
        answer = await second.post(CHAT, BODY | {"stream": True}, idempotency_key="k").whole(5.0)
        assert text_of(answer.events)[0].startswith(TEXT[:60])
        assert answer.events[-1].endswith("data: [DONE]")
