"""The protocol of external processing: bodies in parts, echoes, both directions, every mode, and ends of streams."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3

from kvferry.endpoint_picker.ext_proc import BodyMode
from tests.endpoint_picker.gateway import TEXT, Answered, House, Mode, Stream, at, chat, engine, placed
from tests.waiting import until

LONGEST = 62 * 1024


def cut(data: bytes, seed: int) -> list[bytes]:
    """Parts of any length, empty ones among them."""
    rng, parts = random.Random(seed), []
    while data:
        size = rng.choice((0, 1, 7, 100, 5000, 70_000))
        parts.append(data[:size])
        data = data[size:]
    return parts


@pytest.mark.parametrize("seed", range(4))
async def test_a_body_of_many_parts_comes_back_exactly(seed: int) -> None:
    body = json.dumps(chat(f"{TEXT}é\u2028", spaced="  kept  ", padding=TEXT * 300), indent=seed).encode()
    assert len(body) > 2 * LONGEST
    async with House(engine("e1")) as house:
        stream = house.stream()
        await stream.head()
        *parts, last = cut(body, seed)
        for part in parts:
            await stream.body(part, last=False)
        await stream.body(last, last=True)
        answer = await stream.answered()
        assert answer.endpoints == [at("e1")]
        assert answer.body == body
        assert max(answer.parts) <= LONGEST
        await stream.respond()


async def test_nothing_is_answered_before_the_body_ends() -> None:
    body = json.dumps(chat()).encode()
    async with House(engine("e1")) as house:
        stream = house.stream()
        await stream.head()
        await stream.body(body[:100], last=False)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.2)
        assert not reading.done()
        await stream.body(body[100:], last=False)
        await stream.body(b"", last=True)
        found = Answered(stream)
        placed(await reading, (await reading).request_headers.response, found)
        assert found.endpoints == [at("e1")]
        echo = await stream.read()
        assert echo.request_body.response.body_mutation.streamed_response.body == body
        await stream.respond()


async def test_trailers_end_a_request_s_body() -> None:
    body = json.dumps(chat()).encode()
    async with House(engine("e1")) as house:
        stream = house.stream()
        await stream.head()
        await stream.body(body, last=False)
        await stream.send(request_trailers=v3.HttpTrailers())
        assert (await stream.read()).request_headers is not None
        echo = (await stream.read()).request_body.response.body_mutation.streamed_response
        assert (echo.body, echo.end_of_stream) == (body, False)
        assert (await stream.read()).request_trailers is not None
        await stream.respond()


async def test_a_response_comes_back_part_by_part() -> None:
    async with House(engine("e1")) as house:
        stream = (await house.ask(chat(stream=True))).stream
        await stream.begin()
        for part in (b"data: {}\n\n", b"x" * 150_000, b""):
            await stream.send(response_body=v3.HttpBody(part))
            got = b""
            while len(got) < len(part):
                echo = (await stream.read()).response_body.response.body_mutation.streamed_response
                assert not echo.end_of_stream
                assert 0 < len(echo.body) <= LONGEST
                got += echo.body
            assert got == part
        assert house.bookings() == {"e1": 1}
        await stream.send(response_body=v3.HttpBody(b"data: [DONE]\n\n", end_of_stream=True))
        echo = (await stream.read()).response_body.response.body_mutation.streamed_response
        assert (echo.body, echo.end_of_stream) == (b"data: [DONE]\n\n", True)
        await until(house.free)
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_response_may_end_with_its_head_or_with_trailers() -> None:
    async with House(engine("e1")) as house:
        stream = (await house.ask(chat())).stream
        await stream.send(response_headers=v3.HttpHeaders(end_of_stream=True))
        assert (await stream.read()).response_headers is not None
        await until(house.free)
        stream = (await house.ask(chat())).stream
        await stream.begin()
        await stream.send(response_trailers=v3.HttpTrailers())
        assert (await stream.read()).response_trailers is not None
        await until(house.free)


async def test_a_request_without_a_body_goes_to_any_engine() -> None:
    async with House(engine("e1"), engine("e2")) as house:
        seen = set()
        for _ in range(4):
            stream, found = house.stream(), None
            await stream.head("/v1/models", last=True, headers={":method": "GET"})
            found = Answered(stream)
            message = await stream.read()
            placed(message, message.request_headers.response, found)
            seen |= set(found.endpoints)
            await stream.respond()
        assert seen == {at("e1"), at("e2")}


async def buffered(house: House, body: bytes, response_mode: Mode = Mode.BUFFERED, **sent: Any) -> Stream:
    """A request in buffered mode, up to its answer, which is in `stream.found`."""
    stream = house.stream()
    await stream.head(request_mode=Mode.BUFFERED, response_mode=response_mode)
    first = await stream.read()
    assert first.request_headers is not None
    assert first.request_headers.response is None
    await stream.send(request_body=v3.HttpBody(body, **sent))
    return stream


@pytest.mark.parametrize("last", [True, False])
async def test_a_buffered_body_is_answered_in_one_message(last: bool) -> None:
    """It comes in one, which does not end the stream if trailers follow. Up to the limit of bodies."""
    body = json.dumps(chat(TEXT, padding="x" * 5_000_000)).encode()
    async with House(engine("e1")) as house:
        stream = await buffered(house, body, end_of_stream=last)
        message, found = await stream.read(), Answered(None)
        placed(message, message.request_body.response, found)
        assert found.endpoints == [at("e1")]
        assert found.clears_route
        assert message.request_body.response.body_mutation is None
        await stream.begin()
        await stream.send(response_body=v3.HttpBody(b"{}", end_of_stream=True))
        answer = (await stream.read()).response_body
        assert answer is not None
        assert answer.response is None
        await until(house.free)


async def test_a_buffered_body_is_refused_in_the_same_way() -> None:
    async with House(engine("e1")) as house:
        stream = await buffered(house, b"{", end_of_stream=True)
        assert int((await stream.read()).immediate_response.status.code) == 400


async def test_bodies_that_are_not_shown_are_placed_by_load() -> None:
    """The gateway sends no bodies, or each part must be answered before the next one."""
    async with House(engine("e1")) as house:
        for mode in (Mode.NONE, Mode.STREAMED):
            stream = house.stream()
            await stream.head(request_mode=mode, response_mode=mode)
            message, found = await stream.read(), Answered(stream)
            placed(message, message.request_headers.response, found)
            assert found.endpoints == [at("e1")]
            if mode == Mode.STREAMED:
                await stream.body(b"{", last=False)
                assert (await stream.read()).request_body.response is None
            await stream.begin()
            assert house.bookings() == {"e1": 1}
            await stream.call.done_writing()
            await until(house.free)


@pytest.mark.parametrize("point", ["in the head", "in the body", "while it waits", "in the response", "before it"])
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_stream_that_is_cut_leaves_nothing(point: str, how: str) -> None:
    """House checks that: no booking, no place among the requests in progress."""
    async with House(engine("e1"), queue_timeout=60.0) as house:
        stream = house.stream()
        if point == "while it waits":
            await house.announce("e1", state="draining")
            await until(lambda: house.nodes.entries["e1", 1].drains)
        if point != "in the head":
            await stream.head()
            await stream.body(json.dumps(chat()).encode(), last=point != "in the body")
        if point == "while it waits":
            await until(lambda: house.picker.cluster.held.requests == 1)
        if point in ("in the response", "before it"):
            await stream.answered()
            assert house.bookings() == {"e1": 1}
        if point == "in the response":
            await stream.begin()
        if how == "cancelled":
            stream.call.cancel()
        else:
            await stream.call.done_writing()
        await until(house.free, 3)
        await until(lambda: house.picker.cluster.held.requests == 0, 3)


async def to_the_end(stream: Stream) -> None:
    async with asyncio.timeout(5):
        while await stream.call.read() is not grpc.aio.EOF:
            pass


async def test_messages_out_of_order_end_the_stream() -> None:
    async with House(engine("e1")) as house:
        orders: list[list[dict[str, Any]]] = [
            [{"request_body": v3.HttpBody(b"{}")}],
            [{"request_headers": v3.HttpHeaders()}, {"response_headers": v3.HttpHeaders()}],
            [{"request_headers": v3.HttpHeaders(end_of_stream=True)}, {"request_headers": v3.HttpHeaders()}],
        ]
        for order in orders:
            stream = house.stream()
            for message in order:
                await stream.send(**message)
            with pytest.raises(grpc.aio.AioRpcError, match=r"the head of (a|the) request|end of the request"):
                await to_the_end(stream)
            assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateway_that_names_no_mode_gets_full_duplex() -> None:
    async with House(engine("e1")) as house:
        stream = house.stream()
        await stream.send(request_headers=v3.HttpHeaders())
        await stream.body(json.dumps(chat()).encode(), last=True)
        assert (await stream.answered()).endpoints == [at("e1")]
        await stream.respond()


async def test_two_hundred_streams_at_once() -> None:
    async with House(engine("e1"), engine("e2"), engine("e3"), engine("e4")) as house:

        async def one(number: int) -> str:
            body = json.dumps(chat(f"{number} {TEXT}")).encode()
            stream = house.stream()
            await stream.head()
            for part in cut(body, number):
                await stream.body(part, last=False)
            await stream.body(b"", last=True)
            answer = await stream.answered()
            assert answer.body == body, answer.error
            await gate.wait()
            assert await stream.respond(b"%d" % number * 1000) == b"%d" % number * 1000
            return answer.endpoints[0]

        gate = asyncio.Event()
        running = [asyncio.ensure_future(one(number)) for number in range(200)]
        await until(lambda: sum(house.bookings().values()) == 200, 60)
        assert min(house.bookings().values()) >= 40
        gate.set()
        assert len(await asyncio.gather(*running)) == 200


def test_the_names_of_modes_are_envoy_s() -> None:
    known = {mode.name: mode.value for mode in Mode}
    assert {mode.name: mode.value for mode in BodyMode}.items() <= known.items()
