"""Media that an engine reads: measured against its own chat, never assumed."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvferry.engine_adapter.engine import EngineCall
from kvferry.engine_adapter.engines import vllm_media, vllm_params
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.engine_adapter.measured_modalities import measured_modalities as measured
from kvferry.engine_adapter.measured_modalities import probe
from kvferry.engine_adapter.node_loading import measured_engine
from kvferry.protocol.errors import InvalidRequest, NodeDown, StepFailed
from kvferry.protocol.lease import Rates
from kvferry.protocol.media import MediaItem, RenderRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.router.media.formats import format_of, wav_fault
from kvferry.router.media.image_size import image_size
from tests.engine_adapter.mock_vllm import Behaviour, app_of


class MockHttp:
    """The mock engine in this process, asked as `EngineHttp` asks."""

    host = "127.0.0.1"

    def __init__(self, **behaviour: Any) -> None:
        self.app = app_of(Behaviour(**{"events": False, **behaviour}))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://engine")

    async def post(self, path: str, body: Any, silence_s: float | None = None) -> Any:
        answer = await self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
        if answer.status_code == 400:
            raise InvalidRequest(answer.text)
        if answer.status_code != 200:
            raise StepFailed(answer.text)
        return answer.json()

    async def upload(self, path: str, body: bytes, content_type: str, begun: Any, deliver: Any) -> None:
        answer = await self.http.post(path, content=body, headers={"content-type": content_type})
        if answer.status_code != 200:
            raise StepFailed(f"the engine answered {answer.status_code}")
        begun(answer.headers["content-type"])
        deliver(answer.content)

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def text(self, path: str) -> str:
        return (await self.http.get(path)).text

    async def stream(self, path: str, body: Any, deliver: Callable[[dict[str, Any]], None]) -> None:
        answer = await self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
        if answer.status_code == 400:
            raise InvalidRequest(answer.text)
        for line in answer.text.split("\n\n"):
            if line.startswith("data: {"):
                deliver(json.loads(line[6:]))


async def engine_of(**behaviour: Any) -> VllmEngine:
    http: Any = MockHttp(**behaviour)
    engine = VllmEngine(http)
    await engine.facts()
    return engine


@pytest.mark.parametrize("modalities", [(), ("image",), ("image", "audio", "video"), ("audio",)])
async def test_an_engine_takes_what_it_renders_and_answers(modalities: tuple[str, ...]):
    assert await measured(await engine_of(modalities=modalities)) == modalities


async def test_an_engine_that_hears_transcribes():
    assert await measured(await engine_of(hears=True)) == ("transcription",)
    assert await measured(await engine_of(hears=True, modalities=("audio",))) == ("audio", "transcription")


async def test_all_is_measured_at_once_and_media_only_if_asked_for():
    found = await measured_engine(await engine_of(modalities=("image",)), media=True)
    assert found.modalities == ("image",)
    assert {"greedy_resume", "seeded_resume"} <= set(found.guarantees)
    assert found.rates.prefill_tokens_per_s != Rates().prefill_tokens_per_s
    assert (await measured_engine(await engine_of(modalities=("image",)), media=False)).modalities == ()


async def test_a_model_that_only_transcribes_joins_without_guarantees():
    engine = await engine_of(hears=True, max_model_len=4)
    with pytest.raises((InvalidRequest, StepFailed)):
        await measured_engine(engine, media=False)
    assert (await measured_engine(engine, media=True))[:3] == ((), ("transcription",), Rates())


async def test_an_engine_whose_token_interface_loses_the_picture_takes_none():
    assert await measured(await engine_of(modalities=("image",), blind=True)) == ()


async def test_an_engine_that_refuses_the_probe_takes_none():
    assert await measured(await engine_of(modalities=("image",), fault="refuse")) == ()


async def test_an_engine_without_media_is_not_asked():
    class Plain:
        media = None

    engine: Any = Plain()
    assert await measured(engine) == ()


async def test_an_engine_that_dies_at_the_probe_is_told():
    engine = await engine_of(modalities=("image",))

    async def dies(*asked: Any) -> Any:
        raise NodeDown("gone")

    setattr(engine.media, "render", dies)  # noqa: B010 - a method
    with pytest.raises(NodeDown):
        await measured(engine)


def test_the_probes_are_what_they_say():
    """Sound images, audio and frames: an engine must not refuse them for what they are."""
    image = data_of(probe("image"))
    assert (format_of(image), image_size(image, "image/png")) == ("image/png", (64, 64))
    audio = data_of(probe("audio"))
    assert (format_of(audio), wav_fault(audio)) == ("audio/wav", "")
    with wave.open(io.BytesIO(audio)) as read:
        assert (read.getframerate(), read.getnframes()) == (16_000, 16_000)
    frames = probe("video")["video_url"]["url"].partition(",")[2].split(",")
    assert len(set(frames)) == 4
    assert {format_of(base64.b64decode(frame)) for frame in frames} == {"image/png"}


def data_of(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part[part["type"]]["url"].partition(",")[2])


FEATURES: dict[str, Any] = {
    "mm_hashes": {"image": ["i0", "i1"], "audio": ["a0"]},
    "mm_placeholders": {"image": [{"offset": 2, "length": 3}, {"offset": 9, "length": 1}],
                        "audio": [{"offset": 5, "length": 4}]},
    "kwargs_data": {"image": ["AAE=", "Ag=="], "audio": ["Aw=="]},
}  # fmt: skip
ITEMS = (
    MediaItem("image", "i0", 2, 3, b"\0\1"),
    MediaItem("audio", "a0", 5, 4, b"\3"),
    MediaItem("image", "i1", 9, 1, b"\2"),
)


async def test_features_travel_to_another_engine_as_they_were():
    assert await vllm_media.items_of({**FEATURES, "mm_metadata": {"image": ["x", None]}}) == ITEMS
    body = vllm_params.body(EngineCall("r", (1,) * 12, SamplingParams(), media=ITEMS), "toy")
    sent = await vllm_media.with_features(json.dumps(body).encode(), ITEMS)
    assert json.loads(sent) == json.loads(json.dumps({**body, "features": FEATURES}))
    assert await vllm_media.items_of(None) == ()


async def test_signs_of_life_go_in_between_large_items():
    items, turns = tuple(MediaItem("image", str(at), at, 1, b"x" * 2**20) for at in range(5)), 0
    task = asyncio.create_task(vllm_media.with_features(b'{"a":1}', items))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 5
    assert await vllm_media.items_of(json.loads(await task)["features"]) == items


async def test_media_that_become_too_large_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_media, "MAX_ITEM_BYTES", 3)
    with pytest.raises(InvalidRequest, match="image parts become more than 3 bytes"):
        await vllm_media.items_of({**FEATURES, "kwargs_data": {"image": ["AAAA", "AAAA"], "audio": [""]}})


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"token_ids": None},
        {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}},
        {"token_ids": [1], "features": FEATURES | {"kwargs_data": {"image": [None, None], "audio": [None]}}},
        {"token_ids": [1], "features": FEATURES | {"mm_placeholders": {"image": [], "audio": []}}},
        {"token_ids": [1], "features": FEATURES | {"kwargs_data": {"image": ["a", "b"], "audio": ["!"]}}},
    ],
)
async def test_an_answer_that_cannot_be_read_fails_this_request_alone(told: Any):
    engine = await engine_of()

    async def answer(*asked: Any) -> Any:
        return told

    setattr(engine._http, "post", answer)  # noqa: B010 - a method
    with pytest.raises(StepFailed, match="cannot be read"):
        await engine.media.render(RenderRequest(b'{"messages":[]}'))


async def test_a_chat_goes_to_the_engine_with_its_files_and_what_the_adapter_adds():
    asked: list[tuple[str, Any]] = []
    engine = await engine_of()

    async def answer(path: str, body: bytes, *more: Any) -> Any:
        asked.append((path, json.loads(body)))
        return {"token_ids": [1]}

    setattr(engine._http, "post", answer)  # noqa: B010 - a method
    render = engine.media.render
    await asyncio.gather(render(RenderRequest(b'{"messages":[1]}')), render(RenderRequest(b'{"messages":[2]}'), "lora"))
    text, png, wav = {"type": "text", "text": "Hi"}, "data:image/png;base64,", "data:audio/wav;base64,"
    parts = [text, image_part(png), text, {"type": "audio_url", "audio_url": {"url": wav}}, image_part(png)]
    chat = {"messages": [{"role": "system", "content": "text"}, {"role": "user", "content": parts}, {"role": "user"}]}
    await render(RenderRequest(json.dumps(chat).encode(), files=(b"one", b"three", b"")))
    path = "/v1/chat/completions/render"
    assert asked[:2] == [
        (path, {"model": "toy", "max_tokens": 1, "messages": [1]}),
        (path, {"model": "lora", "max_tokens": 1, "messages": [2]}),
    ]
    parts[1], parts[3] = image_part(f"{png}b25l"), {"type": "audio_url", "audio_url": {"url": f"{wav}dGhyZWU="}}
    assert asked[2] == (path, {"model": "toy", "max_tokens": 1, **chat})


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_a_chat_needs_as_many_files_as_it_names() -> None:
    with pytest.raises(InvalidRequest, match="names 0 media, and 2 files came with it"):
        await vllm_media.with_files(b'{"messages":[{"role":"user","content":"Hi"}]}', [b"a", b"b"])
