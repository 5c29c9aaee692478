"""Heads of responses leave with the first bytes of the body; a cycle tells when its client is gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvferry.protocol.errors import Cancelled
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.response_cycle import ResponseCycle


class Transport(asyncio.Transport):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.closed = list[bytes](), False

    def write(self, data: Any) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def cycle_on(transport: Transport, method: str = "POST", *, keep_alive: bool = True) -> ResponseCycle:
    logger = logging.getLogger("nobody")
    cycle = RequestResponseCycle(
        cast(Any, {"method": method}), transport, FlowControl(transport), logger, logger, False, [(b"Date", b"today")],
        asyncio.Event(), False, keep_alive, lambda: None,
    )  # fmt: skip
    return ResponseCycle.of(cycle)


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_a_head_leaves_with_the_first_bytes() -> None:
    transport = Transport()
    cycle = cycle_on(transport)
    await cycle.send(start((b"X-Id", b"1")))
    await asyncio.sleep(0)  # a buffer that was filled together with the head is written now
    await cycle.send(body(b"abc", more=True))
    await cycle.send(body(b"", more=False))
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\nx-id: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    assert transport.writes == [head + b"3\r\nabc\r\n", b"0\r\n\r\n"]
    assert cycle.response_complete


async def test_chunks_pass_by_messages_only_where_nothing_else_is_to_be_done() -> None:
    transport = Transport()
    cycle = cycle_on(transport)
    assert not cycle.write_chunk(b"before the head")
    await cycle.send(start())
    assert not cycle.write_chunk(b"while the head waits")
    await cycle.send(body(b"abc", more=True))
    assert cycle.write_chunk(b"d")
    cycle.flow.pause_writing()
    assert not cycle.write_chunk(b"to one who does not read")
    cycle.flow.resume_writing()
    cycle.leave()
    assert not cycle.write_chunk(b"to one who has left")
    assert transport.writes[1:] == [b"1\r\nd\r\n"]


async def test_a_response_of_known_length_has_no_chunks() -> None:
    cycle = cycle_on(Transport())
    await cycle.send(start((b"content-length", b"3")))
    await cycle.send(body(b"a", more=True))
    assert not cycle.write_chunk(b"b")


async def test_a_head_without_a_body_leaves_soon() -> None:
    transport = Transport()
    await cycle_on(transport).send(start())
    for _ in range(3):
        await asyncio.sleep(0)
    assert transport.writes == [b"HTTP/1.1 200 OK\r\ndate: today\r\ntransfer-encoding: chunked\r\n\r\n"]


async def test_a_whole_response_is_one_write() -> None:
    transport = Transport()
    cycle = cycle_on(transport, keep_alive=False)
    await cycle.send(start((b"content-length", b"2"), status=404))
    await cycle.send(body(b"no"))
    head = b"HTTP/1.1 404 Not Found\r\ndate: today\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"
    assert (transport.writes, transport.closed) == ([head + b"no"], True)


async def test_the_answer_to_a_head_request_has_no_body() -> None:
    transport = Transport()
    cycle = cycle_on(transport, "HEAD")
    await cycle.send(start((b"content-length", b"2")))
    await cycle.send(body(b"no"))
    assert transport.writes == [b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\n"]


@pytest.mark.parametrize("header", [(b"x", b"1\r\ny: 2"), (b"x y", b"1"), (b"x", b"1\n")])
async def test_no_header_ends_the_head_early(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(RuntimeError, match="Invalid HTTP header"):
        await cycle_on(Transport()).send(start(header))


@pytest.mark.parametrize(("length", "data"), [(b"1", b"no"), (b"3", b"no")])
async def test_a_body_has_the_length_that_its_head_says(length: bytes, data: bytes) -> None:
    cycle = cycle_on(Transport())
    await cycle.send(start((b"content-length", length)))
    with pytest.raises(RuntimeError, match="than Content-Length"):
        await cycle.send(body(data))


async def test_parts_come_in_their_order() -> None:
    cycle = cycle_on(Transport())
    with pytest.raises(RuntimeError, match="unexpected"):
        await cycle.send(body(b"no"))
    await cycle.send(start())
    with pytest.raises(RuntimeError, match="unexpected"):
        await cycle.send(start())
    await cycle.send(body(b"yes"))
    with pytest.raises(RuntimeError, match="unexpected"):
        await cycle.send(body(b"no"))


@pytest.mark.parametrize("early", [True, False])
async def test_work_ends_without_a_watching_task_when_the_client_leaves(early: bool) -> None:
    cycle, tasks = cycle_on(Transport()), len(asyncio.all_tasks())
    if early:
        cycle.leave()
    else:
        asyncio.get_running_loop().call_later(0.01, cycle.leave)

    async def work() -> None:
        assert len(asyncio.all_tasks()) == tasks
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        with pytest.raises(Cancelled):
            await until_disconnect(cast(Any, cycle.receive), work())
    assert cycle.on_disconnect is None


async def test_work_that_ends_is_watched_no_more() -> None:
    cycle = cycle_on(Transport())
    assert await until_disconnect(cast(Any, cycle.receive), asyncio.sleep(0, "done")) == "done"
    cycle.leave()
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task
    assert not task.cancelling()
