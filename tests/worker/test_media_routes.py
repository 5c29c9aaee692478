"""A node's routes for media: errors have a status while nothing is sent, and what runs is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from kvferry.protocol.errors import InvalidRequest, KvferryError, NodeDown
from kvferry.protocol.media import (
    MediaItem,
    RenderedPrompt,
    RenderRequest,
    followed_by,
    joined,
    with_data,
    with_files,
    without_data,
)
from kvferry.protocol.messages import GenerateRequest, Job, PrefillRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.protocol.wire import FrameReader, WireError, pack
from kvferry.protocol.work import Generate
from kvferry.runtime.http import make_app
from kvferry.worker.media_routes import MediaRoutes, read_attempt
from tests.api_parts import served
from tests.waiting import wait_for

ITEMS = (MediaItem("image", "a", 0, 1, b"tensors"), MediaItem("audio", "b", 1, 2, b""))
PROMPT = RenderedPrompt((1, 2, 3), ITEMS)


class Media:
    """An engine that answers as it is told. heard: what it was asked. keeps: its items hold the request's files."""

    def __init__(self, *script: Any, keeps: bool = False) -> None:
        self.script, self.heard, self.dropped, self.keeps = script, list[Any](), 0, keeps

    async def render(self, request: RenderRequest, adapter: str = "") -> RenderedPrompt:
        self.heard.append((request, adapter))
        for each in self.script:
            await self._play(each, lambda data: None)
        return replace(PROMPT, media=with_files(ITEMS, request.files)) if self.keeps else PROMPT

    async def transcribe(
        self, request: SpeechRequest, begun: Callable[[str], None], deliver: Callable[[bytes], None]
    ) -> None:
        self.heard.append(request)
        begun("text/plain")
        for each in self.script:
            await self._play(each, deliver)

    async def _play(self, each: Any, deliver: Callable[[bytes], None]) -> None:
        if isinstance(each, KvferryError):
            raise each
        if isinstance(each, bytes):
            deliver(each)
            return
        try:
            await asyncio.sleep(each)
        except asyncio.CancelledError:
            self.dropped += 1
            raise


def routes_of(media: Any, names: dict[str, str] | None = {"id": "lora"}) -> tuple[FastAPI, MediaRoutes]:  # noqa: B006
    app = make_app(lambda: (200, {}), str)
    return app, MediaRoutes(app, media, lambda: names)


async def post(app: FastAPI, path: str, message: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as http:
        return await http.post(path, content=message if isinstance(message, bytes) else pack(message))


def speech(**more: Any) -> SpeechRequest:
    return SpeechRequest(False, (), "a.wav", b"RIFF", **more)


async def test_a_prompt_is_made_of_the_files_with_the_adapter_by_its_name():
    media, request = Media(), RenderRequest(b"{}", "id", template="{{ a }}")
    app, routes = routes_of(media)
    answer = await post(app, "/attempts/render", b"".join(followed_by(pack(request), (b"one", b"two"))))
    message, *datas = FrameReader().feed(answer.content)
    assert message == RenderedPrompt((1, 2, 3), without_data(ITEMS))
    assert joined(message.media, datas) == ITEMS
    assert media.heard == [(replace(request, files=(b"one", b"two")), "lora")]
    assert routes.running == 0


async def test_files_that_the_router_has_are_not_sent_back():
    app, _ = routes_of(Media(keeps=True))
    body = b"".join(followed_by(pack(RenderRequest(b"{}")), (b"one", b"two" * 99)))
    message, *datas = FrameReader().feed((await post(app, "/attempts/render", body)).content)
    assert message == RenderedPrompt((1, 2, 3), without_data(ITEMS), needs_files=True)
    assert joined(message.media, datas) == ITEMS


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_request_error"),
        (pack(SpeechRequest(False, (), "a", b"")), "invalid_request_error"),
        (pack(RenderRequest(b"{}")) + pack("text"), "invalid_request_error"),
        (pack(RenderRequest(b"{}"))[:-1] + b"\xc1", "wire_error"),
    ],
)
async def test_what_is_no_chat_with_its_files_is_refused(body: bytes, code: str):
    media = Media()
    answer = await post(routes_of(media)[0], "/attempts/render", body)
    assert (answer.status_code, answer.json()["error"]["code"], media.heard) == (400, code, [])


@pytest.mark.parametrize("path", ["/attempts/render", "/attempts/transcribe"])
@pytest.mark.parametrize(
    ("media", "names", "more", "status", "code"),
    [
        (None, {}, {}, 400, "invalid_request_error"),
        (Media(), None, {}, 503, "draining"),
        (Media(InvalidRequest("odd")), {}, {}, 400, "invalid_request_error"),
        (Media(5.0), {}, {"deadline_s": 0.1}, 504, "deadline_exceeded"),
    ],
)
async def test_errors_have_a_status(path: str, media: Any, names: Any, more: dict[str, Any], status: int, code: str):
    app, routes = routes_of(media, names)
    asked = RenderRequest(b"{}", **more) if path.endswith("render") else speech(**more)
    answer = await post(app, path, asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert routes.running == 0


def job(*items: MediaItem) -> Job:
    return Job("r", 0, (1, 2, 3), 3, Generate(SamplingParams()), "router", media=items)


@pytest.mark.parametrize("items", [(), ITEMS])
async def test_a_jobs_media_come_behind_it(items: tuple[MediaItem, ...]):
    generated = b"".join(with_data(pack(GenerateRequest(job(*without_data(items)))), items))
    assert await read_attempt(request_of(generated), GenerateRequest) == GenerateRequest(job(*items))
    prefilled = b"".join(with_data(pack(PrefillRequest(job(*without_data(items)))), items))
    assert await read_attempt(request_of(prefilled), PrefillRequest) == PrefillRequest(job(*items))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        pack(SpeechRequest(False, (), "a", b"")),
        pack(GenerateRequest(job(*ITEMS))),
        pack(GenerateRequest(job())) + pack(b"more"),
        b"".join(with_data(pack(GenerateRequest(job(*ITEMS))), ITEMS[:1])),
        pack(GenerateRequest(job(ITEMS[0]))) + pack("text") + pack(b"file"),
        b"".join(with_data(pack(GenerateRequest(job(*ITEMS))), ITEMS))[:-3],
    ],
)
async def test_a_job_whose_media_do_not_fit_is_refused(body: bytes):
    with pytest.raises((InvalidRequest, WireError)):
        await read_attempt(request_of(body), GenerateRequest)


def request_of(body: bytes) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_an_unknown_adapter_and_another_message_are_refused():
    app, _ = routes_of(Media())
    assert (await post(app, "/attempts/render", RenderRequest(b"{}", "other"))).status_code == 503
    assert (await post(app, "/attempts/render", speech())).status_code == 400
    assert (await post(app, "/attempts/transcribe", speech())).status_code == 503  # an answer without a byte


async def test_a_transcription_comes_in_parts_and_only_the_first_tells_its_type():
    app, routes = routes_of(Media(b"one", 0.01, b"two"))
    answer = await post(app, "/attempts/transcribe", speech())
    parts = list(FrameReader().feed(answer.content))
    assert parts == [SpeechPart(b"one", "text/plain"), SpeechPart(b"two")]
    assert routes.running == 0


def test_an_engine_that_fails_behind_its_first_part_breaks_the_answer_off():
    app, routes = routes_of(Media(b"one", 0.05, NodeDown("gone")))
    with served(app) as url, httpx.stream("POST", f"{url}/attempts/transcribe", content=pack(speech())) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    assert routes.running == 0


@pytest.mark.parametrize("script", [(5.0,), (b"one", 5.0)])
def test_a_caller_that_leaves_ends_the_engines_work(script: tuple[Any, ...]):
    media = Media(*script)
    app, routes = routes_of(media)
    with served(app) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/attempts/transcribe", content=pack(speech()), timeout=0.5)
        wait_for(lambda: media.dropped == 1 and not routes.running, 5)
    assert (routes.running, media.dropped) == (0, 1)
