"""The load generator against servers of a few lines: what it times, what it counts, what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.load import Completion, LoadError, Target, complete, parse

PAUSE_S = 0.05


def event(text: str, tokens: int | None = None) -> bytes:
    usage = None if tokens is None else {"completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": usage}).encode() + b"\n\n"


@asynccontextmanager
async def serving(head: bytes, pieces: Sequence[bytes]) -> AsyncIterator[tuple[Target, list[bytes]]]:
    """A server that answers every request with the pieces as chunks, a pause before each."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = int(request.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        requests.append(await reader.readexactly(length))
        writer.write(head + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            await asyncio.sleep(PAUSE_S)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target(f"http://127.0.0.1:{port}", "a-model"), requests


async def test_events_that_arrive_in_pieces_are_one_arrival_each() -> None:
    first, second = event("a"), event("b")
    pieces = [first[:9], first[9:] + second, event("", 3), b"data: [DONE]\n\n"]
    async with serving(b"HTTP/1.1 200 OK", pieces) as (target, requests):
        done = await complete(target, [5, 6], 3)
    assert done.tokens == 3
    assert len(done.arrivals) == 2
    assert done.arrivals[0] == done.arrivals[1]
    assert done.first_s >= 1.9 * PAUSE_S
    body = json.loads(requests[0])
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([5, 6], 3, True)


async def test_a_refusal_carries_its_text() -> None:
    async with serving(b"HTTP/1.1 400 Bad Request", [b'{"error": "too long"}']) as (target, _):
        with pytest.raises(LoadError, match="too long"):
            await complete(target, [1], 1)


async def test_nobody_listens() -> None:
    async with serving(b"", []) as (target, _):
        pass
    with pytest.raises(LoadError):
        await complete(target, [1], 1)


def test_another_number_of_tokens_is_no_measurement() -> None:
    events = [(1.0, event("a", 2)[6:])]
    with pytest.raises(LoadError, match="2 output tokens instead of 3"):
        parse(0.0, events, 3)
    with pytest.raises(LoadError, match="without text"):
        parse(0.0, [(1.0, event("", 1)[6:])], 1)
    with pytest.raises(LoadError, match="out of memory"):
        parse(0.0, [(1.0, b'{"error": "out of memory"}')], 1)


def test_the_rate_counts_what_came_after_the_first_token() -> None:
    done = Completion(began=1.0, arrivals=(1.5, 2.0, 3.5), tokens=9)
    assert done.first_s == 0.5
    assert done.rate == 4.0
