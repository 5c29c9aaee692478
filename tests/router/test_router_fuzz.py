"""Anything at all at the door: an error object or a clean end, in time, never a 500, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.runtime.signals import StopSignal
from tests.fake_workers import Bench, decode, prefill
from tests.router.test_router_process import router
from tests.waiting import until_told

ANSWER_S = 10.0
LIMITS = {"header_timeout": 0.3, "body_timeout": 0.3}
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/metrics", "/nothing"]
FEW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with Bench([prefill(), decode()]) as bench, router(bench, StopSignal(), **LIMITS) as (client, _):
        yield client


async def ends(client: httpx.AsyncClient, data: bytes) -> bytes:
    """What comes back for these bytes until the router closes, or has answered and waits for another request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            with contextlib.suppress(ConnectionError):
                while part := await asyncio.wait_for(reader.read(65536), 0.8 if answer else None):
                    answer += part
    except TimeoutError:
        assert answer, "neither an answer nor the end"
    finally:
        writer.transport.abort()
    return answer


def check(answer: bytes) -> None:
    """Every response but the successful ones holds an error object; none is the router's own failure."""
    if not answer:
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert status != 500, answer
    if status >= 400:
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if body:
            error = json.loads(body[:length])["error"]
            assert error.keys() == {"message", "type", "param", "code"}


async def idle(client: httpx.AsyncClient) -> None:
    await until_told(client, "kvferry_requests_inflight 0.0", ANSWER_S)


TOKEN = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"\xff", b""])
TARGET = st.sampled_from(
    [*(path.encode() for path in PATHS), b"*", b"//", b"/%ff%00", b"http://x/", b"x:1", b"/a b", b""]
)
VERSION = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.9", b"HTTP", b""])
HEADER = st.sampled_from(
    [
        b"host: x", b"content-length: 5", b"content-length: 0", b"content-length: -1",
        b"content-length: 99999999999999",
        b"content-length: 18446744073709551616", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
        b"connection: close", b"connection: upgrade", b"upgrade: h2c", b"upgrade: websocket", b"expect: 100-continue",
        b"x-request-id: \xff\xfe", b"authorization: Bearer \xc3", b"traceparent: x", b": empty", b"no colon",
        b"x: " + b"y" * 5000, b"a\x00b: c", b"content-type: application/json", b"range: bytes=0-",
    ]
)  # fmt: skip
BODY = st.sampled_from(
    [b"", b"{}", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b'{"prompt":"a"}', b"\0"]
)
EOL = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Bytes that are nearly a request, or several of them."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        eol = draw(EOL)
        line = b" ".join((draw(TOKEN), draw(TARGET), draw(VERSION)))
        parts.append(eol.join([line, *draw(st.lists(HEADER, max_size=4)), b"", draw(BODY)]))
    data = b"".join(parts)
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@given(data=requests() | st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=FEW)
async def test_bytes(client: httpx.AsyncClient, data: bytes) -> None:
    check(await ends(client, data))
    await idle(client)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name", "refusal"]), JSON, max_size=4)
FIELDS = [
    *("prompt", "messages", "model", "n", "stop", "stream", "stream_options", "echo", "logprobs", "top_logprobs"),
    *(
        "prompt_logprobs",
        "logit_bias",
        "stop_token_ids",
        "response_format",
        "tools",
        "documents",
        "tool_choice",
        "seed",
    ),
    *("chat_template_kwargs", "reasoning_effort", "cache_salt", "truncate_prompt_tokens", "modalities", "tokens"),
    *("add_generation_prompt", "continue_final_message", "return_token_ids", "max_tokens", "return_token_strs"),
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(MESSAGE, max_size=3), max_size=4)


@given(path=st.sampled_from(PATHS[:4]), fields=BODIES, valid=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=FEW)
async def test_json(client: httpx.AsyncClient, path: str, fields: dict[str, Any], valid: bool) -> None:
    base: dict[str, Any] = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    body = {name: base[name] for name in ("max_tokens", "messages" if "chat" in path else "prompt")} if valid else {}
    response = await client.post(path, content=json.dumps({**body, **fields}), timeout=ANSWER_S)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    await idle(client)
