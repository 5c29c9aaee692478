"""Responses of the Responses and Messages APIs that go on at another router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api_parts import FakeCluster, says
from tests.router_pair import LEASE_S, Router, Shared, values

TEXT = "One two three four five six seven eight nine ten. " * 3
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODY: dict[str, Any] = {"input": "Count.", "max_output_tokens": 200}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count."}], "max_tokens": 200, "stream": True,
    "model": "SmolLM2-135M-Instruct",
}  # fmt: skip
EVENTS = {"accept": "text/event-stream"}


def shared(gap_s: float = 0.01, **script: Any) -> Shared:
    return Shared(FakeCluster(says(TEXT, **script), gap_s=gap_s))


async def completed(router: Router, name: str, within_s: float = 10.0) -> dict[str, Any]:
    """Return a response once it is not in progress."""
    async with asyncio.timeout(within_s):
        while True:
            response = (await router.get(f"{RESPONSES}/{name}").whole()).json()
            if response["status"] != "in_progress":
                return dict(response)
            await asyncio.sleep(0.02)


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name != "completed_at"}


@pytest.mark.parametrize("per_output", [1, 3])
@pytest.mark.parametrize("dies", [True, False])
async def test_a_response_s_events_go_on_behind_a_number(per_output: int, dies: bool) -> None:
    together = shared(per_output=per_output)
    async with Router(together) as first, Router(together) as second:
        exchange = first.post(RESPONSES, {**BODY, "stream": True})
        await exchange.until(14)
        if dies:
            first.kill()
        known = values(exchange.events)
        name = known[0]["response"]["id"]
        rest = await second.get(f"{RESPONSES}/{name}?stream=true&starting_after={len(known) - 1}").whole()
        assert rest.status == 200, rest.data
        every = [*known, *values(rest.events)]
        assert [event["sequence_number"] for event in every] == list(range(len(every)))
        assert every[-1]["type"] == "response.completed"
        deltas = "".join(event["delta"] for event in every if event["type"] == "response.output_text.delta")
        assert deltas == every[-1]["response"]["output"][0]["content"][0]["text"]
        assert deltas.startswith(TEXT[:100])
        ended = await second.get(f"{RESPONSES}/{name}?stream=true").whole()
        again = values(ended.events)
        assert [timeless(each.get("response", each)) for each in again] == [
            timeless(each.get("response", each)) for each in every
        ]
        assert (await completed(second, name))["status"] == "completed"
        for number in ("x", "-2", "1" * 20):
            refused = await second.get(f"{RESPONSES}/{name}?stream=true&starting_after={number}").whole()
            assert refused.status == 400


async def test_a_background_response_is_completed_by_another_router() -> None:
    together = shared(0.06)
    async with Router(together) as first, Router(together) as second:
        begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
        assert begun["status"] == "in_progress"
        await asyncio.sleep(0.6)
        first.kill()
        shown = (await second.get(f"{RESPONSES}/{begun['id']}").whole()).json()
        assert shown["status"] == "in_progress"
        response = await completed(second, begun["id"])
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"].startswith(TEXT[:100])
        delivered = together.cluster.dispatches[1].spec.delivered
        assert delivered is not None
        assert len(delivered.token_ids) >= 5
        assert second.count("kvferry_takeovers_total", kind="response") == 1
        assert len(together.cluster.dispatches) == 2
        await asyncio.sleep(LEASE_S)
        assert await together.leases.orphans() == []


async def test_without_a_record_a_dead_router_s_response_is_shown_as_failed() -> None:
    """It stayed in progress for ever."""
    together = shared(0.03)
    async with Router(together, resume_window=0.0) as first, Router(together, resume_window=0.0) as second:
        begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
        await asyncio.sleep(0.2)
        first.kill()
        response = await completed(second, begun["id"])
        assert response["status"] == "failed"
        assert "no events" in response["error"]["message"]


async def test_what_no_other_router_can_go_on_with_is_finished_by_a_draining_one() -> None:
    together = shared(0.02)
    async with Router(together, resume_window=0.0) as first:
        begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
        await asyncio.sleep(0.2)
        first.ownership.drain()
        assert (await completed(first, begun["id"]))["status"] == "completed"


async def test_a_repeated_background_request_is_the_same_response() -> None:
    together = shared(0.02)
    async with Router(together) as first, Router(together) as second:
        body = {**BODY, "background": True}
        begun = [(await each.post(RESPONSES, body, idempotency_key="k").whole()).json() for each in (first, second)]
        assert begun[0]["id"] == begun[1]["id"]
        assert [each["status"] for each in begun] == ["in_progress"] * 2
        assert (await completed(second, begun[0]["id"]))["status"] == "completed"
        assert len(together.cluster.dispatches) == 1


async def test_a_draining_router_gives_its_background_responses_up() -> None:
    together = shared(0.03)
    async with Router(together) as second:
        async with Router(together) as first:
            begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
            await asyncio.sleep(0.4)
            first.ownership.drain()
            response = await completed(second, begun["id"])
        assert response["status"] == "completed"
        delivered = together.cluster.dispatches[1].spec.delivered
        assert delivered is not None
        assert len(delivered.token_ids) >= 10, "all that was generated"
        assert together.cluster.dispatches[0].cancelled.is_set()


async def test_any_router_cancels_and_deletes() -> None:
    together = shared(0.03)
    async with Router(together) as first, Router(together) as second:
        ids = [(await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()["id"] for _ in range(2)]
        await asyncio.sleep(0.5)
        cancelled = await second.post(f"{RESPONSES}/{ids[0]}/cancel", {}).whole()
        assert cancelled.status == 200, cancelled.data
        assert cancelled.json()["status"] == "cancelled"
        assert cancelled.json()["output"][0]["content"][0]["text"], "what was recorded is shown"
        async with asyncio.timeout(2):
            while not together.cluster.dispatches[0].cancelled.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await first.get(f"{RESPONSES}/{ids[0]}").whole()).json()["status"] == "cancelled"
        deleted = await second.send("DELETE", f"{RESPONSES}/{ids[1]}").whole()
        assert deleted.status == 200
        await asyncio.sleep(0.7)
        assert (await first.get(f"{RESPONSES}/{ids[1]}").whole()).status == 404
        assert all(dispatch.cancelled.is_set() for dispatch in together.cluster.dispatches[:2])


async def test_a_dead_router_s_response_is_cancelled_before_it_is_taken_over() -> None:
    together = shared(0.03)
    async with Router(together) as first, Router(together) as second:
        begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
        await asyncio.sleep(0.4)
        first.kill()
        cancelled = await second.post(f"{RESPONSES}/{begun['id']}/cancel", {}).whole()
        assert cancelled.json()["status"] == "cancelled"
        await asyncio.sleep(2 * LEASE_S)
        assert len(together.cluster.dispatches) == 1


async def test_events_of_a_background_response_can_be_followed() -> None:
    together = shared(0.02)
    async with Router(together) as first, Router(together) as second:
        begun = (await first.post(RESPONSES, {**BODY, "background": True}).whole()).json()
        followed = await second.get(f"{RESPONSES}/{begun['id']}?stream=true").whole()
        every = values(followed.events)
        assert every[-1]["type"] == "response.completed"
        assert every[-1]["response"]["output"] == (await completed(first, begun["id"]))["output"]
        assert len(together.cluster.dispatches) == 1


@pytest.mark.parametrize("per_output", [1, 4])
@pytest.mark.parametrize("events", [1, 2, 3, 4, 9, -3, -2, -1])
async def test_a_message_goes_on_behind_any_event(per_output: int, events: int) -> None:
    together = shared(0.0, per_output=per_output)
    async with Router(together) as router:
        exchange = await router.post(MESSAGES, MESSAGE, **EVENTS).whole()
        whole = exchange.events
        await asyncio.sleep(0.35)
        exchange.cut(events % len(whole))
        rest = await router.post(MESSAGES, MESSAGE, last_event_id=exchange.last_id).whole()
        assert [*exchange.events, *rest.events] == whole
        assert len(together.cluster.dispatches) == 1


async def test_a_deleted_response_leaves_no_record_of_its_events() -> None:
    together = shared()
    async with Router(together) as first, Router(together) as second:
        whole = await first.post(RESPONSES, {**BODY, "stream": True}).whole()
        name = values(whole.events)[0]["response"]["id"]
        assert (await second.get(f"{RESPONSES}/{name}?stream=true").whole()).status == 200
        assert (await second.send("DELETE", f"{RESPONSES}/{name}").whole()).status == 200
        async with asyncio.timeout(5):
            while await together.journals.read("", name) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await first.get(f"{RESPONSES}/{name}?stream=true").whole()).status == 404
