"""Clients that come back: what they send again, and when they give up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.chaos import asking
from tests.chaos.asking import Answered, Asking, urls_from

URLS = ("http://a", "http://b")
BODY: dict[str, Any] = {"prompt": [1], "stream": True}


class Answer(httpx.AsyncByteStream):
    """Events of a stream, and then its end or a break."""

    def __init__(self, *events: str, breaks: bool = False) -> None:
        self._events, self._breaks = events, breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event.encode()
        if self._breaks:
            raise httpx.ReadError("broken")


def event(place: int, *tokens: int) -> str:
    part = {"choices": [{"index": 0, "token_ids": tokens}]}
    return f"id: r:{place}\ndata: {json.dumps(part)}\n\n"


DONE = "data: [DONE]\n\n"


def refusal(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": "x", "message": message}})


class Routers:
    """Answers in order, whichever router is asked; what was sent is kept."""

    def __init__(self, *answers: httpx.Response | Answer) -> None:
        self._answers: Iterator[httpx.Response | Answer] = iter(answers)
        self.sent: list[tuple[str, str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        headers = request.headers
        self.sent.append((request.url.host, headers.get("last-event-id", ""), headers.get("idempotency-key", "")))
        answer = next(self._answers)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, stream=answer)


async def asked(routers: Routers, **more: Any) -> tuple[Asking, list[int]]:
    counted: list[int] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(routers)) as http:
        request = Asking(http, BODY | more, counted.append)
        await request.until_answered(URLS)
    return request, counted


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "AGAIN_S", 0.0)


async def test_a_broken_stream_is_taken_up_behind_its_last_event_at_the_next_router() -> None:
    routers = Routers(Answer(event(1, 5), event(3, 6, 7), breaks=True), Answer(event(4, 8), DONE))
    request, counted = await asked(routers)
    assert request.tokens == {0: (5, 6, 7, 8)}
    assert counted == [1, 2, 1]
    (first, second) = routers.sent
    assert (first[:2], second[:2]) == (("a", ""), ("b", "r:3"))
    assert first[2] == second[2] != ""


async def test_a_stream_that_ends_early_or_refuses_for_now_is_asked_again() -> None:
    routers = Routers(Answer(event(1, 5)), refusal(503, "no owner yet"), Answer(event(2, 6), DONE))
    request, _ = await asked(routers)
    assert (request.tokens, request.tries, request.began_anew) == ({0: (5, 6)}, 3, 0)
    assert [host for host, _, _ in routers.sent] == ["a", "b", "a"]


async def test_what_the_routers_lost_begins_anew_under_another_key() -> None:
    gone = refusal(404, "no events of 'r' are kept")
    routers = Routers(Answer(event(2, 5, 6), breaks=True), gone, Answer(event(2, 5, 6), event(3, 7), DONE))
    request, _ = await asked(routers)
    assert (request.tokens, request.began_anew) == ({0: (5, 6, 7)}, 1)
    assert routers.sent[2][1] == ""
    assert routers.sent[2][2] != routers.sent[0][2]


async def test_a_refusal_that_came_too_late_for_a_status_is_waited_out_as_well() -> None:
    late = {"error": {"code": "registry_unavailable", "message": "no owner yet"}}
    refused = Answer(": keep-alive\n\n", f"data: {json.dumps(late)}\n\n")
    found, _ = await asked(Routers(Answer(event(1, 5)), refused, Answer(event(2, 6), DONE)))
    assert found.tokens == {0: (5, 6)}


@pytest.mark.parametrize("status", [400, 503])
async def test_a_first_refusal_is_an_answer(status: int) -> None:
    with pytest.raises(Answered, match=str(status)):
        await asked(Routers(refusal(status, "no")))


async def test_an_error_in_the_stream_is_an_answer() -> None:
    failed = 'data: {"error": {"code": "server_error", "message": "x"}}\n\n'
    with pytest.raises(Answered, match="in stream: server_error"):
        await asked(Routers(Answer(event(1, 5), failed)))


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 0.02)
    monkeypatch.setattr(asking, "AGAIN_S", 0.005)
    with pytest.raises(Answered, match="no answer in"):
        await asked(Routers(Answer(event(1, 5), breaks=True), *(refusal(503, "no owner") for _ in range(100))))


async def test_a_whole_answer_is_asked_for_again_with_the_same_key() -> None:
    whole = httpx.Response(200, json={"choices": [{"index": 0, "token_ids": [5, 6]}]})
    routers = Routers(httpx.Response(200, stream=Answer("{", breaks=True)), whole)
    request, counted = await asked(routers, stream=False)
    assert (request.tokens, counted) == ({0: (5, 6)}, [2])
    assert routers.sent[0][2] == routers.sent[1][2]


def test_routers_are_asked_in_turn_from_any_one_on() -> None:
    assert urls_from({"router-0": "a", "router-1": "b"}, "router-1") == ["b", "a"]
