"""HTTP requests and answer counts that all hostile clients of the benchmark share (benchmarks.attacks)."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable

from benchmarks.load import post

answers: Counter[str] = Counter()
"""Answers by status, or by error."""
key = ""
"""API key of all hostile clients."""
media_model = ""
"""Model whose chats hold hostile images; empty: the only one."""


async def exchange(port: int, data: bytes, *, wait_s: float = 30.0) -> bytes:
    """Send data, and read until the server ends the answer. Returns the answer's beginning."""
    first, end = b"", "closed"
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                while part := await reader.read(2**16):
                    first = first or part
            finally:
                writer.transport.abort()
    except TimeoutError:
        end = "left"
    except OSError:
        end = "reset"
    answers[first[9:12].decode("latin-1") if first.startswith(b"HTTP/1.1 ") else end] += 1
    return first


def asking(path: str, body: object) -> bytes:
    return post("x", path, body if isinstance(body, bytes) else json.dumps(body).encode(), last=True, key=key)


def completion(prompt: object, tokens: int, **more: object) -> bytes:
    return asking("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "stream": True, **more})


async def forever(port: int, at_once: int, requests: Callable[[int], bytes]) -> None:
    async def client(number: int) -> None:
        for turn in itertools.count(number, at_once):
            await exchange(port, requests(turn))

    await asyncio.gather(*(client(number) for number in range(at_once)))
