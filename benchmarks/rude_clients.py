"""Hostile clients of `benchmarks.attacks` that misuse connections: slow, unread, dropped or malformed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

from benchmarks import attacking
from benchmarks.attacking import answers, completion, exchange, forever
from benchmarks.load import post, random_prompt

SLOW_SOCKETS, NO_READERS = 300, 4


async def slow(port: int) -> None:
    """Open sockets that send nothing, half a header, or a body byte by byte, and reopen closed ones."""
    starts = (b"", b"POST /v1/completions HTTP/1.1\r\nx-a: ",
              b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")  # fmt: skip

    async def drip(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(starts[number % 3])
                while not writer.is_closing():
                    await asyncio.sleep(1.0)
                    writer.write(b"a" if number % 3 else b"")
                    await writer.drain()
            await asyncio.sleep(0.5)

    await asyncio.gather(*map(drip, range(SLOW_SOCKETS)))


async def readers(port: int, *, read: bool) -> None:
    """Open streams and read nothing; or, with `read`, read them."""

    async def client(number: int) -> None:
        source = random.Random(number)
        while True:
            data = completion(random_prompt(source, 20), 200, ignore_eos=True, logprobs=5)
            if read:
                await exchange(port, data)
                continue
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(data)
            await asyncio.sleep(5.0)
            writer.transport.abort()

    await asyncio.gather(*map(client, range(NO_READERS)))


async def leavers(port: int) -> None:
    """Disconnect twenty clients per second within a fifth of a second, in any state of their request."""
    source = random.Random(1)

    async def client() -> None:
        prompt = random_prompt(source, source.choice((20, 300, 1500)))
        await exchange(port, completion(prompt, 200), wait_s=source.uniform(0.0, 0.2))

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(client())
            await asyncio.sleep(0.05)


async def garbage(port: int) -> None:
    """Send bytes that are not HTTP, endless headers, and requests by the thousand in one piece."""
    requests = (b"\0" * 9999, b"GET / HTTP/1.1\r\nx: " + b"y" * 10**6,
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500 + b"\0",
            b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n")  # fmt: skip
    await forever(port, 4, lambda turn: requests[turn % len(requests)])


async def refused(port: int) -> None:
    """Send requests that get a 4xx at once, one after another on eight connections."""
    requests = [
        post("x", "/v1/completions", b"{", key=attacking.key),
        post("x", "/v1/chat/completions", b'{"messages":[]}', key=attacking.key),
        post("x", "/v1/completions", b'{"prompt":"a","max_tokens":-1}', key=attacking.key),
        post("x", "/v1/nothing", b"{}", key=attacking.key),
        post("x", "/v1/completions", b'{"prompt":"a"}', key="wrong"),
    ]

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for turn in itertools.count():
                    writer.write(requests[turn % len(requests)])
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                    await reader.readexactly(int(length))
                    answers[head[9:12].decode()] += 1

    await asyncio.gather(*(client() for _ in range(8)))
