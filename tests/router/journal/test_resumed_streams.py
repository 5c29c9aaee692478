"""Streams that clients take up again, at the same router or another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api_parts import FakeCluster, says
from tests.router_pair import CHAT, LEASE_S, Router, Shared, text_of, values

TEXT = "One two three four five six seven eight nine ten eleven twelve. " * 3
MESSAGES = [{"role": "user", "content": "Count."}]
CHAT_BODY = {"messages": MESSAGES, "stream": True, "max_tokens": 200}
COMPLETION = {"prompt": "Count.", "stream": True, "max_tokens": 200}
EVENTS = {"accept": "text/event-stream"}


def shared(gap_s: float = 0.0, **script: Any) -> Shared:
    return Shared(FakeCluster(says(TEXT, **script), gap_s=gap_s))


async def undisturbed(path: str, body: dict[str, Any]) -> list[str]:
    async with Router(shared()) as router:
        return (await router.post(path, body, **EVENTS).whole()).events


async def test_only_clients_that_read_ids_get_them() -> None:
    async with Router(shared()) as router:
        plain = await router.post(CHAT, CHAT_BODY).whole()
        assert b"id: " not in plain.data
        exchange = await router.post(CHAT, CHAT_BODY, **EVENTS).whole()
        assert all(event.startswith("id: chatcmpl-") for event in exchange.events)
        assert text_of(exchange.events) == text_of(plain.events)
        off = Router(shared(), resume_window=0.0)
        assert b"id: " not in (await off.post(CHAT, CHAT_BODY, **EVENTS).whole()).data


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), ("/v1/completions", COMPLETION)])
async def test_a_stream_goes_on_at_another_router_after_the_death_of_the_first(path: str, body: dict[str, Any]) -> None:
    together = shared(gap_s=0.01)
    whole = text_of(await undisturbed(path, body))
    async with Router(together) as first, Router(together) as second:
        exchange = await first.post(path, body, **EVENTS).until(12)
        first.kill()
        await asyncio.sleep(LEASE_S + 0.1)
        rest = await second.post(path, body, last_event_id=exchange.last_id).whole()
        assert rest.status == 200
        assert text_of([*exchange.events, *rest.events]) == whole
        assert rest.events[-1].endswith("data: [DONE]")
        assert second.count("kvferry_takeovers_total", kind="stream") == 1
        ids = {value["id"] for value in values([*exchange.events, *rest.events])}
        assert len(ids) == 1, "the answer's id is the same"


async def test_a_client_may_come_back_before_the_lease_is_over() -> None:
    together = shared(gap_s=0.01)
    async with Router(together) as first, Router(together) as second:
        exchange = await first.post(CHAT, CHAT_BODY, **EVENTS).until(12)
        await asyncio.sleep(0.3)
        first.kill()
        rest = await second.post(CHAT, CHAT_BODY, last_event_id=exchange.last_id).whole()
        assert text_of([*exchange.events, *rest.events])[0].startswith(TEXT[:100])
        assert rest.events[-1].endswith("data: [DONE]")


async def test_a_client_that_leaves_stops_the_work_and_takes_it_up_again() -> None:
    together = shared(gap_s=0.01)
    whole = text_of(await undisturbed(CHAT, CHAT_BODY))
    async with Router(together) as first, Router(together) as second:
        exchange = await first.post(CHAT, CHAT_BODY, **EVENTS).until(12)
        await exchange.leave()
        (dispatch,) = together.cluster.dispatches
        assert dispatch.cancelled.is_set()
        await asyncio.sleep(0.1)
        name = exchange.last_id.partition(":")[0]
        for path_id in (name, name.partition(".")[0]):
            rest = await second.get(f"{CHAT}/{path_id}", last_event_id=exchange.last_id, **EVENTS).whole()
            assert rest.status == 200
            assert text_of([*exchange.events, *rest.events]) == whole
        assert len(together.cluster.dispatches) == 2, "the second time it was recorded"
        delivered = together.cluster.dispatches[1].spec.delivered
        assert delivered is not None
        assert len(delivered.token_ids) >= 10


@pytest.mark.parametrize("events", [0, 1, 2, 3, 17, -3, -2, -1])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stream_options": {"include_usage": True}}, {"logprobs": True}])
async def test_any_event_may_be_the_last_that_came(events: int, more: dict[str, Any]) -> None:
    together, body = shared(), {**CHAT_BODY, **more}
    async with Router(together) as router:
        exchange = await router.post(CHAT, body, **EVENTS).whole()
        whole = exchange.events
        await asyncio.sleep(0.35)
        exchange.cut(events % len(whole) if events else 0)
        resume = {"last_event_id": exchange.last_id} if exchange.last_id else EVENTS
        rest = await router.post(CHAT, body, **resume).whole()
        if exchange.last_id:
            assert [*exchange.events, *rest.events] == whole if not more.get("n") else True
            assert len(together.cluster.dispatches) == more.get("n", 1)
        assert text_of([*exchange.events, *rest.events]) == text_of(whole)


async def test_what_cannot_be_resumed_is_refused() -> None:
    together = shared()
    async with Router(together, resume_window=0.5) as router:
        exchange = await router.post(CHAT, CHAT_BODY, **EVENTS).whole()
        known = exchange.last_id
        await asyncio.sleep(0.3)
        for header, body, status, param in (
            ("nonsense", CHAT_BODY, 400, "Last-Event-ID"),
            ("chatcmpl-unknown:3", CHAT_BODY, 404, None),
            (known, {**CHAT_BODY, "max_tokens": 7}, 422, "Last-Event-ID"),
            (known.replace(":", ":1,"), CHAT_BODY, 400, "Last-Event-ID"),
        ):
            refused = await router.post(CHAT, body, last_event_id=header).whole()
            assert refused.status == status, refused.data
            assert refused.json()["error"]["param"] == param
        other = await router.get(f"/v1/completions/{known.partition(':')[0]}", last_event_id=known).whole()
        assert other.status == 404
        stranger = await router.get(f"{CHAT}/chatcmpl-other", last_event_id=known).whole()
        assert stranger.status == 400
        await asyncio.sleep(0.6)
        late = await router.post(CHAT, CHAT_BODY, last_event_id=known).whole()
        assert late.status == 404
        assert "0.5 s" in late.json()["error"]["message"]
