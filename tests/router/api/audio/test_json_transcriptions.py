"""Transcriptions whose audio is base64 in JSON, as Open WebUI and clients of OpenRouter send them."""

from __future__ import annotations

import base64
import gc
import json
from typing import Any

import httpx
import pytest

from kvferry.protocol.speech import SpeechPart
from kvferry.router.api.audio.json_body import SpeechJson
from kvferry.router.long_work import LongWork
from kvferry.router.media.prompting import MediaBudget
from tests.api_parts import Api, error_of
from tests.router.api.audio.test_transcriptions import api_of
from tests.router.media import pictures as made
from tests.router.media.test_large_media import with_peak

WAV = base64.b64encode(made.wav()).decode()


async def transcribe(api: Api, path: str = "transcriptions", **fields: Any) -> httpx.Response:
    body = {"model": "SmolLM2-135M-Instruct", "input_audio": {"data": WAV, "format": "wav"}, **fields}
    return await api.http.post(f"/v1/audio/{path}", json=body)


@pytest.mark.parametrize("path", ["transcriptions", "translations"])
async def test_audio_in_json_reaches_a_node(path: str):
    api = api_of()
    answer = await transcribe(api, path, language="en", prompt="", temperature=0, response_format=None)
    assert (answer.status_code, answer.json()) == (200, {"text": "hello"})
    (asked,) = api.cluster.media.heard
    assert (asked.audio, asked.filename, asked.translate) == (made.wav(), "audio.wav", path == "translations")
    assert asked.fields == (("language", "en"), ("response_format", "json"), ("temperature", "0.0"))


async def test_times_of_words_and_streams_can_be_asked_for():
    api = api_of(SpeechPart(b"data: 1\n\n", "text/event-stream"))
    more: dict[str, Any] = {"timestamp_granularities": ["word"], "stream": True, "response_format": "verbose_json"}
    assert (await transcribe(api, **more)).text == "data: 1\n\n"
    (asked,) = api.cluster.media.heard
    assert asked.fields == (
        ("response_format", "verbose_json"), ("stream", "true"), ("timestamp_granularities[]", "word"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_audio": None}, "input_audio"),
        ({"input_audio": {}}, "input_audio.data"),
        ({"input_audio": {"data": ""}}, "input_audio.data"),
        ({"input_audio": {"data": WAV[:-3]}}, "input_audio.data"),
        ({"input_audio": {"data": "?" * 8}}, "input_audio.data"),
        ({"input_audio": {"data": "AAAA"}}, "input_audio.data"),
        ({"input_audio": {"data": base64.b64encode(made.wav(rate=1)).decode()}}, "input_audio.data"),
        ({"input_audio": {"data": WAV, "format": "../wav"}}, "input_audio.format"),
        ({"model": "other"}, "model"),
        ({"response_format": "xml"}, "response_format"),
        ({"include": ["logprobs"]}, "include"),
        ({"timestamp_granularities": ["hour"]}, "timestamp_granularities[0]"),
    ],
)
async def test_a_wrong_field_of_json_is_named(fields: dict[str, Any], param: str):
    api = api_of()
    answer = await transcribe(api, **fields)
    assert 400 <= answer.status_code < 500
    assert error_of(answer)["param"] == param
    assert api.cluster.media.heard == []


@pytest.mark.parametrize("data", [b"", b"{}", b'{"input_audio": ', b"[]", b"null"])
async def test_no_body_of_either_kind_is_refused(data: bytes):
    assert (await api_of().http.post("/v1/audio/transcriptions", content=data)).status_code == 400


async def test_granularities_may_be_named_as_in_forms():
    api = api_of()
    more: dict[str, Any] = {"timestamp_granularities[]": ["word", "segment"], "response_format": "verbose_json"}
    assert (await transcribe(api, **more)).status_code == 200
    (asked,) = api.cluster.media.heard
    assert [each for name, each in asked.fields if name == "timestamp_granularities[]"] == ["word", "segment"]
    more["timestamp_granularities[]"] = ["hour"]
    answer = await transcribe(api, **more)
    assert error_of(answer)["param"] == "timestamp_granularities[][0]"


async def test_null_counts_as_missing():
    api = api_of()
    names = set(SpeechJson.model_fields) - {"model", "input_audio"} | {"timestamp_granularities[]"}
    audio = {"data": WAV, "format": None}
    assert (await transcribe(api, input_audio=audio, **dict.fromkeys(names))).status_code == 200
    (asked,) = api.cluster.media.heard
    assert (asked.fields, asked.filename) == ((("response_format", "json"),), "audio.bin")
    assert error_of(await transcribe(api, input_audio={"data": None}))["param"] == "input_audio.data"


async def test_the_body_is_freed_before_its_audio_is_decoded():
    body = {"input_audio": {"data": base64.b64encode(made.wav().ljust(3 * 2**20, b"\0")).decode()}}
    data, api = json.dumps(body).encode(), api_of()
    answer, peak = await with_peak(api.http.post("/v1/audio/transcriptions", content=data))
    assert answer.status_code == 200
    assert peak < 2.25 * len(data), "body and base64, then base64 and file"


def budget_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[MediaBudget, list[int]]:
    """A budget of that many bytes, and what it holds after each decoded slice."""
    budget, held = MediaBudget(limit), list[int]()

    class Watched(LongWork):
        async def pause(self) -> None:
            held.append(budget.held)
            await super().pause()

    monkeypatch.setattr("kvferry.router.media.prompting.MediaBudget", lambda: budget)
    monkeypatch.setattr("kvferry.router.media.data_urls.LongWork", Watched)
    return budget, held


async def test_audio_in_json_counts_as_held_from_decoding_until_its_answer(monkeypatch: pytest.MonkeyPatch):
    size = len(WAV) * 3 // 4
    budget, held = budget_of(monkeypatch, len(WAV) + size)
    api, heard = api_of(), list[int]()
    hear = api.cluster.media.transcribe

    async def transcribed(*asked: Any) -> None:
        heard.append(budget.held)
        await hear(*asked)

    monkeypatch.setattr(api.cluster.media, "transcribe", transcribed)
    assert (await transcribe(api)).status_code == 200
    assert (set(held), heard) == ({len(WAV) + size}, [size])
    api.cluster.media.heard.clear()
    gc.collect()
    assert budget.held == 0


async def test_audio_in_json_without_room_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    budget, held = budget_of(monkeypatch, len(WAV) + 10)
    assert (await transcribe(api_of())).status_code == 429
    gc.collect()
    assert (budget.held, held) == (0, [])
