"""The client of an engine's HTTP server: events, refusals, and connections that break."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine_adapter.engine_errors import refusal
from kvferry.engine_adapter.http_client import MAX_EVENT_BYTES, EngineHttp, EventDecoder
from kvferry.engine_adapter.prometheus_text import labels, value
from kvferry.protocol.errors import ConfigError, InvalidRequest, NodeDown, NodeLost, Overloaded, StepFailed
from tests.redis_servers import free_ports

EVENTS = b'data: {"a": 1}\n\n: a comment\r\ndata: {"b": "\xc3\xa4"}\r\n\r\ndata: [DONE]\n\n'


@given(st.lists(st.integers(1, len(EVENTS) - 1), unique=True))
def test_events_are_read_however_the_bytes_are_cut(cuts):
    decoder, bounds = EventDecoder(), [0, *sorted(cuts), len(EVENTS)]
    found = [each for a, b in itertools.pairwise(bounds) for each in decoder.feed(EVENTS[a:b])]
    assert found == [b'{"a": 1}', b'{"b": "\xc3\xa4"}']


def test_an_event_without_an_end_costs_what_its_bytes_cost():
    """Each part is looked at once: a decoder that joins all parts again for each new one copies gigabytes."""
    decoder, part = EventDecoder(), b"x" * 4096
    began = time.process_time()
    for _ in range(MAX_EVENT_BYTES // len(part)):
        assert decoder.feed(part) == ()
    with pytest.raises(ValueError, match="too long"):
        decoder.feed(part)
    assert time.process_time() - began < 2.0


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[EngineHttp]:
    """A server that reads a request and then writes whatever it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    http = EngineHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield http
    finally:
        await http.close()
        server.close()


def head(status: str, length: int) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n".encode()


async def test_a_connection_that_breaks_in_a_stream_is_a_node_that_died():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", 1000) + b'data: {"a": 1}\n\n')
        await writer.drain()

    seen: list[Any] = []
    async with answering(answer) as http:
        with pytest.raises(NodeDown):
            await http.stream("/x", {}, seen.append)
    assert seen == [{"a": 1}]


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_no_death():
    """llama.cpp's server promises to keep the connection of a stream, and closes it."""
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.append(len(asked))
        writer.write(head("200 OK", 16) + b'data: {"a": 1}\n\n')
        await reader.read(1)  # the next request arrives, and nobody reads it
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    http = EngineHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    seen: list[Any] = []
    for _ in range(3):
        await http.stream("/x", {}, seen.append)
    assert (seen, len(asked)) == ([{"a": 1}] * 3, 3)
    server.close()
    with pytest.raises(NodeDown):
        await http.stream("/x", {}, seen.append)
    await http.close()


async def test_a_refused_connection_is_a_node_that_died():
    (port,) = free_ports(1)
    with pytest.raises(NodeDown):
        await EngineHttp(f"http://127.0.0.1:{port}").get("/x")


async def test_silence_is_a_node_that_is_lost():
    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async with answering(answer) as http:
        with pytest.raises(NodeLost, match="silent"):
            await http.get("/x", 0.1)


async def test_an_answer_that_is_no_json_is_a_node_that_is_lost():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", 3) + b"abc")

    async with answering(answer) as http:
        with pytest.raises(NodeLost, match="not JSON"):
            await http.get("/x")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (422, InvalidRequest),
        (429, Overloaded),
        (503, Overloaded),
        (403, StepFailed),
        (500, StepFailed),
    ],
)
def test_a_refusal_keeps_the_engines_words(status, kind):
    for body in (b'{"error": {"message": "why"}}', b'{"detail": "why"}', b'{"message": "why"}', b"why"):
        error = refusal(status, body, None)
        assert type(error) is kind
        assert error.message == f"the engine answered {status}: why"


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="url must be"):
        EngineHttp(url)


METRICS = """# HELP a:b words
a:b{engine="0",model="x y"} 2.0
a:b{engine="1"} 3.0
a:bc 7
info{block_size="16",note="a \\"quoted\\" word"} 1.0
nan NaN
process_start_time_seconds 1.79e+09
"""


def test_values_are_summed_over_labels_and_names_are_whole():
    assert value(METRICS, "a:b") == 5.0
    assert value(METRICS, "missing", "a:bc") == 7.0
    assert value(METRICS, "process_start_time_seconds") == 1.79e9
    assert value(METRICS, "nan") == value(METRICS, "a") == 0.0
    assert labels(METRICS, "info") == {"block_size": "16", "note": 'a \\"quoted\\" word'}
    assert labels(METRICS, "other") == {}


async def test_half_a_surrogate_pair_is_an_event_as_any_other():
    async def answer(writer: asyncio.StreamWriter) -> None:
        data = b'data: {"text": "\\ud83d"}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))

    found: list[dict[str, Any]] = []
    async with answering(answer) as http:
        await http.stream("/completions", {}, found.append)
    assert found == [{"text": "\ud83d"}]
