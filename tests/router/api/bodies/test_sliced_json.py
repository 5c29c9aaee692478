"""Long JSON texts, parsed in slices: the values of the library's parser, and the event loop goes on."""

from __future__ import annotations

import gc
import json
import random
import re
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from pydantic_core import from_json

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies import sliced_json
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.parse_pacing import MAX_VALUES
from kvferry.router.api.bodies.reader import parse, parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.sliced_json import MAX_DEPTH, MAX_FIELDS, Numbers, SlicedJson, TooManyObjects
from kvferry.router.api.tokenization import DetokenizeBody

MILLION = MAX_VALUES - 100
HELD_S = 0.02
"""Longest step of a body's parsing, in seconds of CPU; three times as much is allowed on a busy machine."""
TRIES = 4
"""Most runs, of which the best one counts: what a busy machine adds to a step, it adds to another one in each run."""
SCALARS = (0, -7, 1.5, 1e300, True, False, None, "", "a,b", 'q"[{', "\\", "\\\\", "ü€😀", "\n\t", "]}", 2**70)


def value(source: random.Random, depth: int) -> Any:
    """Return any JSON value."""
    kind = source.random()
    if depth == 0 or kind < 0.4:
        return source.choice(SCALARS)
    count = source.choice((0, 1, 2, 3))
    if kind < 0.7:
        return [value(source, depth - 1) for _ in range(count)]
    return {f"{source.choice(SCALARS)}{number}": value(source, depth - 1) for number in range(count)}


def text(source: random.Random) -> bytes:
    """Return any JSON text, spaced in one of several ways."""
    made = json.dumps(
        value(source, source.choice((1, 2, 4, 9))),
        ensure_ascii=source.random() < 0.5,
        indent=source.choice((None, None, 1)),
        separators=source.choice((None, (",", ":"), (" , ", " : "))),
    )
    return made.encode()


async def read(data: bytes, most: int = 2**30) -> Any:
    return await SlicedJson(data, most).value()


@pytest.mark.parametrize("window", [8, 64, 1024])
async def test_values_are_those_of_the_library(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_json, "WINDOW", window)
    monkeypatch.setattr(sliced_json, "PLAIN", window)
    source = random.Random(window)
    for _ in range(60):
        data = text(source)
        found = await read(data)
        assert found == from_json(data)
        assert repr(found) == repr(from_json(data)), "the order of fields and the kinds of numbers, too"


@pytest.mark.parametrize("window", [16, 1024])
async def test_what_is_no_json_for_the_library_is_none(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_json, "WINDOW", window)
    monkeypatch.setattr(sliced_json, "PLAIN", window)
    source = random.Random(window)
    damaged = [b"", b"[", b"]", b"[1,]", b"[,1]", b"[,]", b"{,}", b'{"a":1,}', b'{"a"}', b"[1 2]", b"[1}", b'"', b"1 1"]
    damaged += [b"[[1]2]", b'{"a":[1]"b":2}', b'{"a" 1}', b"{1:2}", b'["a\\"]', b"[\x00]", b"nul", b"[1,,2]", b'"\xff"']
    for _ in range(150):
        whole = bytearray(text(source))
        at = source.randrange(len(whole))
        whole[at : at + source.choice((0, 1))] = bytes(source.choices(b',:[]{}"\\1 e', k=source.choice((0, 1))))
        damaged.append(bytes(whole))
    for data in damaged:
        try:
            expected = from_json(data)
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011 - its words are the library's
                await read(data)
        else:
            assert await read(data) == expected, data


async def test_lists_and_objects_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_json, "WINDOW", 32)
    data = json.dumps({"text": "[{" * 100, "lists": [[{}]] * 10, "numbers": [1] * 100}).encode()
    assert await read(data, 23) == from_json(data)
    with pytest.raises(TooManyObjects):
        await read(data, 22)


@pytest.mark.parametrize("character", ["a", "\u00fc", "\u20ac", "\U0001f600"])
async def test_no_long_string_is_parsed_at_once(character: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are such strings. A piece ends between two characters, whatever their bytes."""
    lengths = list[int]()

    def watched(data: bytes) -> Any:
        lengths.append(len(data))
        return from_json(data)

    monkeypatch.setattr(sliced_json, "WINDOW", 1024)
    monkeypatch.setattr(sliced_json, "PLAIN", 4096)
    monkeypatch.setattr(sliced_json, "from_json", watched)
    for shift in range(4):
        value = "x" * shift + character * 10_000
        assert await read(json.dumps([value], ensure_ascii=False).encode()) == [value]
    assert max(lengths) <= 4096 + 2
    cut_off = json.dumps("\u20ac" * 10_000, ensure_ascii=False).encode()
    for damaged in (cut_off[:-2] + b'"', b'"' + b"\x80" * 20_000 + b'"', cut_off.replace(b"\xac", b"\n", 1)):
        with pytest.raises(ValueError, match="byte"):
            await read(damaged)


async def test_depth_is_bounded() -> None:
    assert await read(b"[" * 100 + b"]" * 100) == from_json(b"[" * 100 + b"]" * 100)
    deep = MAX_DEPTH + 10
    with pytest.raises(ValueError, match="recursion"):
        await read(b"[" * deep + b"1" + b"]" * deep)


async def test_lists_of_integers_alone_are_marked() -> None:
    assert type(await read(b"[" + b"1," * 10_000 + b"1]")) is Numbers
    assert type(await read(b"[" + b"1," * 10_000 + b"true]")) is list
    assert type(await read(b"[" + b"1," * 10_000 + b"1.0]")) is list


def longest_step_s(work: Coroutine[Any, Any, Any]) -> tuple[float, Any]:
    """Run what only lets the event loop go on; return the CPU seconds of the longest step, and the outcome."""
    longest, outcome = 0.0, None
    while True:
        began = time.thread_time()
        try:
            work.send(None)
        except StopIteration as end:
            outcome = end.value
        except InvalidRequest as error:
            outcome = error
        else:
            longest = max(longest, time.thread_time() - began)
            continue
        return max(longest, time.thread_time() - began), outcome


FIELDS: dict[str, tuple[type[RequestBody], bytes]] = {
    "prompt": (CompletionBody, b"[" + b"12345," * MILLION + b"1]"),
    "prompts": (CompletionBody, b"[" + (b"[" + b"7," * 511 + b"7],") * 2000 + b"[1]]"),
    "strings": (CompletionBody, b"[" + b'"a",' * MILLION + b'"a"]'),
    "mixed": (CompletionBody, b"[" + b"1," * MILLION + b'"a"]'),
    "objects": (CompletionBody, b"[" + b"{}," * (2**15 - 10) + b"1," * (MILLION - 2**16) + b"1]"),
    "tokens": (DetokenizeBody, b"[" + b"12345," * (2**18 - 1) + b"1]"),
    "many tokens": (DetokenizeBody, b"[" + b"12345," * MILLION + b"1]"),
    "stop": (CompletionBody, b"[" + b'"a",' * MILLION + b'"a"]'),
    "logit_bias": (CompletionBody, b"{" + b",".join(b'"%d":1' % n for n in range(MILLION)) + b"}"),
    "allowed_token_ids": (CompletionBody, b"[" + b"1," * MILLION + b"1]"),
    "bad_words": (CompletionBody, b"[" + b'"a",' * MILLION + b'"a"]'),
    "unknown": (CompletionBody, b"[" + b"null," * MILLION + b"1]"),
    "messages": (ChatBody, b"[" + b'{"role":"user","content":"a"},' * 8191 + b'{"role":"user","content":"a"}]'),
    "brackets": (CompletionBody, b'["' + b"[" * 40_000 + b'",' + b"1," * (MILLION - 50_000) + b"1]"),
}
"""Field names (their last words) with hostile values."""


@pytest.fixture
def frozen() -> Iterator[None]:
    """As in a router, what existed before the requests is not looked through in the middle of a step."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen", "unpaced")
@pytest.mark.parametrize("name", FIELDS)
def test_no_body_holds_the_event_loop(name: str) -> None:
    kind, content = FIELDS[name]
    field = {"prompts": "prompt", "strings": "prompt", "mixed": "prompt", "objects": "prompt", "brackets": "prompt"}
    field |= {"many tokens": "tokens"}
    data = b'{"%b":%b,"prompt":"a"}' if name not in field and kind is CompletionBody else b'{"%b":%b}'
    data %= (field.get(name, name).encode(), content)
    longest, found = longest_step_s(parsed(kind, data))
    for _ in range(TRIES - 1):
        if longest >= HELD_S:
            longest = min(longest, longest_step_s(parsed(kind, data))[0])
    assert longest < 3 * HELD_S
    if name == "logit_bias":
        assert isinstance(found, InvalidRequest)
        assert str(found) == f"an object of the request body has more than {MAX_FIELDS} fields"
        return
    if isinstance(found, InvalidRequest):
        with pytest.raises(InvalidRequest, match=re.escape(str(found))):
            parse(kind, data)
    else:
        assert found == parse(kind, data)
