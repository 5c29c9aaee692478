"""Large media pass through a router in slices, and are copied as seldom as they can be: new memory costs most."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import tracemalloc
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from starlette.types import Message

from kvferry.router.api.bodies import sliced_json
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.reader import BodyReader, parsed
from kvferry.router.media import base64_text
from kvferry.router.media.data_urls import decoded
from kvferry.router.media.refusal import InvalidMedia
from kvferry.router.request_context import CALL, NO_RESUME, RequestContext
from tests.router.media import pictures as made

SIZE = 3 * 2**20
URL = made.data_url(made.png().ljust(SIZE, b"\0"), made.PNG)
BODY = json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]})
CHARACTERS = 'ABab019+/=-_\\"\n é,'


async def with_peak(work: Awaitable[Any]) -> tuple[Any, int]:
    """What the work returns, and the most bytes that it held at once."""
    tracemalloc.start()
    try:
        return await work, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_a_body_is_read_into_one_buffer():
    data = BODY.encode()
    places = list(range(0, len(data), 2**16))

    async def receive() -> Message:
        at = places.pop(0)
        return {"type": "http.request", "body": data[at : at + 2**16], "more_body": bool(places)}

    call = RequestContext("a", 0.0, 1.0, "", "", resume=NO_RESUME)
    found, peak = await with_peak(BodyReader(2**24).take({"headers": [], CALL: call}, receive))
    assert found == data
    assert type(found) is bytes
    assert peak < 1.3 * len(data)


@pytest.mark.parametrize("text", ["", "ü"])
async def test_of_a_long_string_one_copy_is_made(text: str):
    url = URL + text
    data = BODY.replace(URL, url).encode()
    body, peak = await with_peak(parsed(ChatBody, data))
    assert body.messages[0]["content"][0]["image_url"]["url"] == url
    if not text:
        assert peak < 1.1 * len(url)


async def test_data_are_decoded_into_one_buffer():
    found, peak = await with_peak(decoded(URL, "url"))
    assert found == made.png().ljust(SIZE, b"\0")
    assert peak < 1.3 * SIZE


@pytest.mark.parametrize("work", [lambda: decoded(URL, "url"), lambda: parsed(ChatBody, BODY.encode())])
async def test_no_step_takes_more_than_a_slice(work: Any, monkeypatch: pytest.MonkeyPatch):
    """Each step decodes or checks one piece; what other requests do meanwhile comes between any two."""
    pieces, turns = list[int](), 0
    decoder = base64_text._DECODER

    class Decoder:
        def validate_json(self, text: str) -> Any:
            pieces.append(turns)
            return decoder.validate_json(text)

    def watched(data: bytes) -> Any:
        pieces.append(turns)
        return from_json(data)

    monkeypatch.setattr(base64_text, "_DECODER", Decoder())
    monkeypatch.setattr(sliced_json, "from_json", watched)
    monkeypatch.setattr(sliced_json, "SLICE_S", 0.0)
    task = asyncio.ensure_future(work())
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(pieces) > SIZE // 2**16
    assert max(pieces.count(turn) for turn in set(pieces)) <= 2


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=30), st.integers(0, 45), st.sampled_from(["", "", *CHARACTERS, "\\u0041", "\ud800"]),
    st.integers(0, 2),
)  # fmt: skip
def test_base64_is_that_of_the_standard_library(data: bytes, at: int, odd: str, skipped: int):
    text = base64.b64encode(data).decode()
    text = text[:at] + odd + text[at + skipped :]
    expected = None
    if text and not len(text) % 4:
        try:
            expected = binascii.a2b_base64(text, strict_mode=True)
        except ValueError:
            expected = None
    try:
        found = asyncio.run(decoded(f"data:image/png;base64,{text}", "url"))
    except InvalidMedia:
        assert expected is None, text
    else:
        assert found == expected, text
