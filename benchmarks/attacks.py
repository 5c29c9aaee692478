"""Hostile clients, each by name, that run until SIGTERM; `benchmarks.hostile` starts them.

    python -m benchmarks.attacks NAME PORT [KEY [MEDIA_MODEL]]
    python -m benchmarks.attacks burn SHARE

`burn` is no attack: it uses a share of a core, as the attackers themselves do on the same machine. At the end each
prints a line of JSON with the answers by status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import attacking
from benchmarks.attacking import answers, asking, completion, exchange, forever
from benchmarks.load import random_prompt
from benchmarks.media_attacks import picture_bytes, pictures
from benchmarks.rude_clients import garbage, leavers, readers, refused, slow

WORDS = "river stone cloud market "

NICE = 5


async def bodies(port: int) -> None:
    """Send bodies of the largest size and above: one text, numbers, objects, escapes, and bodies without a length."""
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunked %= attacking.key.encode()
    requests = [
        completion(WORDS * 600_000, 2),
        completion([7] * 900_000, 2),
        asking("/v1/chat/completions", b'{"messages": [%b{}]}' % (b'{"role":"user","content":"a"},' * 250_000)),
        completion("\0" * 2_000_000, 2),
        chunked + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 20 + b"0\r\n\r\n",
        chunked + b"1\r\n \r\n" * 3_000_000,
        chunked + b"1\r\n \r\n0\r\n" + b"a: b\r\n" * 2_000_000,
    ]
    await forever(port, 2, lambda turn: requests[turn % len(requests)])


async def texts(port: int) -> None:
    """Send a megabyte of text to be tokenised, repeatedly."""
    await forever(port, 4, lambda turn: asking("/tokenize", {"prompt": f"{turn} {WORDS * 40_000}"}))


async def grammars(port: int) -> None:
    """Send regular expressions and schemas that grow when compiled, each only once."""

    def ask(turn: int) -> bytes:
        regex = f"{turn}((a{{1,{900 + turn % 90}}}){{1,1000}}){{1,1000}}"
        wide = {"type": "object", "properties": {f"p{turn}-{number}": {"type": "string"} for number in range(2000)}}
        return completion("a", 2, **({"guided_regex": regex} if turn % 2 else {"guided_json": wide}))

    await forever(port, 4, ask)


async def nested(port: int) -> None:
    """Send JSON at and above the nesting limit, where it is stored, rendered, or compiled as a grammar."""

    def deep(levels: int) -> Any:
        value: Any = "x"
        for _ in range(levels):
            value = {"a": [value]}
        return value

    hi = [{"role": "user", "content": "hi"}]
    requests = [
        asking("/v1/chat/completions", {"messages": hi, "max_tokens": 2, "documents": [deep(80)] * 200}),
        asking("/v1/chat/completions", {"messages": hi, "max_tokens": 2, "chat_template_kwargs": {"a": deep(90)}}),
        asking("/v1/chat/completions", {"messages": hi, "max_tokens": 2, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"const": deep(25)}}}}),
        asking("/v1/completions", b"[" * 1_000_000),
        asking("/v1/completions", b'{"prompt":' + b'{"a":' * 300_000),
    ]  # fmt: skip
    await forever(port, 4, lambda turn: requests[turn % len(requests)])


async def biases(port: int) -> None:
    """Send the longest allowed logit_bias and similar lists, for many tokens."""
    lists = {
        "logit_bias": {str(token): 1.0 for token in range(1000, 1300)},
        "allowed_token_ids": list(range(1000, 1000 + 2**15)),
        "bad_words": [f"{number} word words" for number in range(128)],
        "stop_token_ids": list(range(40_000, 41_024)),
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "ignore_eos": True,
    }
    await forever(port, 4, lambda turn: completion(f"{turn}", 100, **lists))


async def choices(port: int) -> None:
    """Send requests with a hundred choices and more."""
    await forever(port, 2, lambda turn: completion(f"{turn} river", 16, n=128, logprobs=5, ignore_eos=True))


async def prompts(port: int) -> None:
    """Send prompts as long as the context allows, each only once."""
    source = random.Random(2)
    await forever(port, 2, lambda turn: completion(random_prompt(source, 8000), 8))


async def tools(port: int) -> None:
    """Send the largest number of tools, one of which must be called."""

    def ask(turn: int) -> bytes:
        fields = {
            f"f{number}": {"type": "string", "enum": [f"{number}-{each}" for each in range(8)]} for number in range(8)
        }
        many = [
            {"type": "function", "function": {"name": f"t{turn}_{number}", "description": "x" * 100,
             "parameters": {"type": "object", "properties": fields, "required": list(fields)}}}
            for number in range(128)
        ]  # fmt: skip
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": many,
            "tool_choice": "required",
            "max_tokens": 20,
        }
        return asking("/v1/chat/completions", body)

    await forever(port, 4, ask)


async def stops(port: int) -> None:
    """Send the largest number of the longest stop strings, all of which almost match."""
    strings = ["a" * (960 + number) + "b" for number in range(63)]
    a = {"guided_regex": "a{4000}"}
    await forever(port, 4, lambda turn: completion(f"{turn} " + "a" * 200, 300, stop=strings, ignore_eos=True, **a))


async def bytes_of_utf8(port: int) -> None:
    """Send bodies that are not UTF-8, and ask for tokens that only continue a character."""
    found = await exchange(port, asking("/tokenize", {"prompt": "\U0010ffff", "add_special_tokens": False}))
    last = json.loads(found.partition(b"\r\n\r\n")[2])["tokens"][-1]
    requests = [
        completion("a", 1500, allowed_token_ids=[last], ignore_eos=True),
        completion("a", 1500, allowed_token_ids=[last], ignore_eos=True, logprobs=5),
        asking("/v1/completions", b'{"prompt":"' + b"\xff\xfe\xed\xa0\x80" * 200_000 + b'"}'),
    ]
    await forever(port, 4, lambda turn: requests[turn % len(requests)])


async def vectors(port: int) -> None:
    """Send the largest number of texts to embed."""
    await forever(port, 2, lambda turn: asking("/v1/embeddings", {"input": [f"{turn} {n} river" for n in range(2048)]}))


async def plain(port: int) -> None:
    """Send short chats from four clients: the load of another tenant's fair half, not an attack."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    await forever(port, 4, lambda turn: asking("/v1/chat/completions", body | {"seed": turn}))


def burn(share: float) -> None:
    while True:
        until = time.perf_counter() + 0.01 * share
        while time.perf_counter() < until:
            pass
        time.sleep(0.01 * (1 - share))


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    "bodies": bodies, "texts": texts, "nested": nested, "utf8": bytes_of_utf8, "garbage": garbage, "refused": refused,
    "slow sockets": slow, "leavers": leavers,
    "readers": lambda port: readers(port, read=True), "no readers": lambda port: readers(port, read=False),
    "grammars": grammars, "tools": tools, "biases": biases, "stops": stops,
    "choices": choices, "prompts": prompts, "vectors": vectors, "pictures": pictures, "picture bytes": picture_bytes,
    "plain": plain,
}  # fmt: skip


async def attack(name: str, port: int) -> None:
    attacking = asyncio.ensure_future(ATTACKS[name](port))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, attacking.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await attacking


if __name__ == "__main__":
    os.nice(NICE)
    if sys.argv[1] == "burn":
        burn(float(sys.argv[2]))
    attacking.key, attacking.media_model = [*sys.argv[3:5], "", ""][:2]
    asyncio.run(attack(sys.argv[1], int(sys.argv[2])))
    print(json.dumps(answers))
