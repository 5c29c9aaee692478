"""Ends of requests of the API of token ids: aborts, lost clients, deadlines, full and draining nodes. Books balance."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest

from kvferry.decode_worker.scale_out.open_requests import WAITING_PER_SEAT
from kvferry.protocol.errors import StepFailed
from tests.decode_worker.scale_out.generate_client import Client, client_of, reasons_of, tokens_of
from tests.toy import expected, make_engine
from tests.waiting import until
from tests.worker_pair import Router, Worker, worker

PROMPT = [5, 17, 80, 2]
ABORTS = ("/abort_requests", "/inference/v1/abort_requests")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Of one decode node; afterwards its books balance."""
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        yield client
        await node.settle()


def running(node: Worker) -> int:
    """Requests that the engine has."""
    return len(list(node.engine.request_table))


@pytest.mark.parametrize("sent", ["a1", "generate-tokens-a1"])
@pytest.mark.parametrize("path", ABORTS)
async def test_an_abort_ends_a_stream(client: Client, path: str, sent: str) -> None:
    client.node.pause_at(4)
    async with client.streaming(PROMPT, request_id="a1", params={"max_tokens": 200}) as chunks:
        got = [await anext(chunks)]
        await until(lambda: client.node.paused)
        answer = await client.http.post(path, json={"request_ids": ["other", sent]})
        assert (answer.status_code, answer.content) == (200, b"")
        client.node.resume()
        got += [chunk async for chunk in chunks]
    assert reasons_of(got) == ["abort"]
    assert 1 <= len(tokens_of(got)) <= 5
    assert tokens_of(got) == expected(PROMPT, len(tokens_of(got)))
    await until(lambda: not running(client.node))


async def test_an_abort_ends_a_whole_answer_with_the_tokens_so_far(client: Client) -> None:
    client.node.pause_at(4)
    asked = [asyncio.create_task(client.whole(PROMPT, request_id="same", params={"max_tokens": 200})) for _ in "ab"]
    await until(lambda: client.node.paused and client.node.service._scale_out._open.taken == 2)
    await client.http.post("/abort_requests", json={"request_ids": ["same"]})
    client.node.resume()
    for answer in await asyncio.gather(*asked):
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert choice["token_ids"] == expected(PROMPT, len(choice["token_ids"]))
        assert len(choice["token_ids"]) < 10


async def test_one_id_may_be_used_again_after_an_abort(client: Client) -> None:
    await client.http.post("/abort_requests", json={"request_ids": ["a"]})
    for _ in range(2):
        assert (await client.whole(PROMPT, request_id="a"))["choices"][0]["token_ids"] == expected(PROMPT, 8)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_ends_its_request(client: Client, streams: bool) -> None:
    client.node.pause_at(3)
    ask = client.streamed if streams else client.whole
    asked = asyncio.create_task(ask(PROMPT, params={"max_tokens": 200}))  # type: ignore[operator]
    await until(lambda: client.node.paused)
    asked.cancel()
    await until(lambda: not client.node.service.busy())
    client.node.resume()
    await until(lambda: not running(client.node))
    assert client.node.node.metrics.attempts["cancelled"]._value.get() == 1


async def test_a_request_beyond_its_deadline_fails() -> None:
    async with worker("decode", make_engine(), enable_scale_out=True, scale_out_timeout=0.01) as node:
        async with client_of(node) as client:
            node.pause_at(2)
            asked = asyncio.create_task(client.post(PROMPT, params={"max_tokens": 200}))
            await until(lambda: node.paused)
            await asyncio.sleep(2.1)
            node.resume()
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        await node.settle()


async def test_a_stream_that_fails_ends_with_the_error(client: Client) -> None:
    run, steps = client.node.engine.runner.run, [1, 2]

    def broken(*step: object, **options: object) -> object:
        if not steps:
            raise StepFailed("injected")
        steps.pop()
        return run(*step, **options)  # type: ignore[arg-type]

    client.node.engine.runner.run = broken  # type: ignore[method-assign, assignment]
    *chunks, last = await client.streamed(PROMPT)
    client.node.engine.runner.run = run  # type: ignore[method-assign]
    assert last["error"]["code"] == "step_failed"
    assert tokens_of(chunks) == expected(PROMPT, 2)


async def test_a_full_node_refuses_and_recovers() -> None:
    seats = 2
    async with worker("decode", make_engine(), enable_scale_out=True, max_num_seqs=seats) as node:
        async with client_of(node) as client:
            node.pause_at(0)
            most = seats * (1 + WAITING_PER_SEAT)
            asked = [asyncio.create_task(client.whole([7, number])) for number in range(most)]
            await until(lambda: node.service._scale_out._open.taken == most)
            full = await client.post([1])
            assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
            assert full.headers["retry-after"] == "1"
            node.resume()
            for number, answer in enumerate(await asyncio.gather(*asked)):
                assert answer["choices"][0]["token_ids"] == expected([7, number], 8)
            assert (await client.post([1])).status_code == 200
        await node.settle()


async def test_a_drain_lets_answers_end_and_refuses_new_ones() -> None:
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        node.pause_at(2)
        asked = asyncio.create_task(client.whole(PROMPT))
        await until(lambda: node.paused)
        node.stop.handle(signal.SIGTERM)
        await until(lambda: node.node.state == "draining")
        late = await client.post(PROMPT)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert late.headers["retry-after"]
        node.resume()
        assert (await asked)["choices"][0]["token_ids"] == expected(PROMPT, 8)
        await asyncio.wait_for(asyncio.shield(node.run), 10)


async def test_a_hurried_end_answers_what_is_open() -> None:
    async with worker("decode", make_engine(), enable_scale_out=True) as node, client_of(node) as client:
        node.pause_at(3)
        asked = asyncio.create_task(client.post(PROMPT, params={"max_tokens": 200}))
        await until(lambda: node.paused)
        began = time.monotonic()
        node.stop.handle(signal.SIGINT)
        node.resume()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert time.monotonic() - began < 5


async def test_a_router_and_the_api_run_side_by_side(client: Client) -> None:
    router = Router(None, client.node, "router")  # type: ignore[arg-type]
    await router.connect()
    asked = asyncio.create_task(client.whole(PROMPT, params={"max_tokens": 100}))
    await until(lambda: client.node.service.busy())
    await router.hang_up()
    await until(lambda: not client.node.loaded._streams._routers)
    assert (await asked)["choices"][0]["token_ids"] == expected(PROMPT, 100)
    await router.close()


async def test_without_the_flag_there_is_no_such_endpoint() -> None:
    async with worker("decode", make_engine()) as node, client_of(node) as client:
        assert (await client.post(PROMPT)).status_code == 404
        for path in ABORTS:
            assert (await client.http.post(path, json={"request_ids": []})).status_code == 404
