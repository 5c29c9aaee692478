"""Transcriptions: passed to a node that hears, passed on as they come, refused by name elsewhere."""

from __future__ import annotations

import gc
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import InvalidRequest, NodeLost, NoNodes
from kvferry.protocol.media import TRANSCRIPTION
from kvferry.protocol.speech import SpeechPart
from kvferry.router.media.prompting import MediaBudget
from tests.api_parts import Api, FakeCluster, error_of, says
from tests.router.media import pictures as made

JSON = "application/json"


def api_of(*speech: Any, hears: bool = True, **settings: Any) -> Api:
    cluster = FakeCluster(says("unused"))
    cluster.media.takes = (TRANSCRIPTION,) if hears else ("image",)
    cluster.media.speech = list(speech or [SpeechPart(b'{"text":', JSON), SpeechPart(b'"hello"}')])
    return Api(cluster, **settings)


async def transcribe(
    api: Api, data: bytes | None = None, path: str = "transcriptions", **fields: Any
) -> httpx.Response:
    files = {"file": ("talk.wav", made.wav() if data is None else data)}
    return await api.http.post(f"/v1/audio/{path}", files=files, data=fields)


@pytest.mark.parametrize("path", ["transcriptions", "translations"])
async def test_audio_reaches_a_node_and_its_answer_the_client(path: str):
    api = api_of()
    answer = await transcribe(api, path=path, language="en")
    assert (answer.status_code, answer.headers["content-type"]) == (200, JSON)
    assert answer.json() == {"text": "hello"}
    (asked,) = api.cluster.media.heard
    assert (asked.audio, asked.filename, asked.translate) == (made.wav(), "talk.wav", path == "translations")
    assert asked.fields == (("language", "en"), ("response_format", "json"))
    assert 0 < asked.deadline_s <= 600
    assert api.sample("kvferry_requests_total", endpoint=f"/v1/audio/{path}", status="200") == 1


async def test_a_stream_is_passed_on_and_told_when_it_breaks():
    events = [SpeechPart(b"data: 1\n\n", "text/event-stream; charset=utf-8"), SpeechPart(b"data: 2\n\n")]
    whole = await transcribe(api_of(*events), stream="true")
    assert (whole.text, whole.headers["content-type"].partition(";")[0]) == ("data: 1\n\ndata: 2\n\n",
                                                                            "text/event-stream")  # fmt: skip
    broken = await transcribe(api_of(*events, NodeLost("gone")), stream="true")
    assert broken.text.startswith("data: 1\n\ndata: 2\n\ndata: {")
    assert "node_lost" in broken.text


async def test_a_type_that_a_browser_would_run_is_not_passed_on():
    answer = await transcribe(api_of(SpeechPart(b"<script>", "text/html")))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_no_node_that_transcribes_is_a_refusal_by_name():
    api = api_of(hears=False)
    answer = await transcribe(api)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "/v1/audio/transcriptions is not supported" in error["message"]
    assert api.cluster.media.heard == []


@pytest.mark.parametrize(
    ("data", "fields", "param"),
    [
        (b"", {}, "file"),
        (b"no audio", {}, "file"),
        (made.png(), {}, "file"),
        (made.wav(rate=1), {}, "file"),
        (None, {"model": "other"}, "model"),
        (None, {"response_format": "xml"}, "response_format"),
    ],
)
async def test_what_is_wrong_is_named(data: bytes | None, fields: dict[str, Any], param: str):
    api = api_of()
    answer = await transcribe(api, data, **fields)
    assert 400 <= answer.status_code < 500
    assert error_of(answer)["param"] == param
    assert api.cluster.media.heard == []


@pytest.mark.parametrize("data", [b"fLaC" + b"\0" * 50, b"OggS" + b"\0" * 50, made.MP3, made.MP4])
async def test_formats_of_recorders_are_taken(data: bytes):
    assert (await transcribe(api_of(), data)).status_code == 200


@pytest.mark.parametrize(("error", "status"), [(InvalidRequest("odd"), 400), (NoNodes("none"), 503)])
async def test_errors_before_the_first_byte_have_a_status(error: Any, status: int):
    assert (await transcribe(api_of(error))).status_code == status


async def test_audio_counts_as_held_until_its_answer(monkeypatch: pytest.MonkeyPatch):
    budget = MediaBudget(len(made.wav()) + 10)
    monkeypatch.setattr("kvferry.router.media.prompting.MediaBudget", lambda: budget)
    api, seen = api_of(), list[int]()
    hear = api.cluster.media.transcribe

    async def transcribed(*asked: Any) -> None:
        seen.append(budget.held)
        await hear(*asked)

    monkeypatch.setattr(api.cluster.media, "transcribe", transcribed)
    assert (await transcribe(api)).status_code == 200
    api.cluster.media.heard.clear()
    gc.collect()
    assert (seen, budget.held) == ([len(made.wav())], 0)
    assert (await transcribe(api, made.wav(seconds=1.0))).status_code == 429


async def test_a_long_body_is_refused():
    api = api_of(max_body_mib=1)
    assert (await transcribe(api, made.wav() + b"\0" * 2**20)).status_code == 413


async def test_the_form_is_described():
    described = (await api_of().http.get("/openapi.json")).json()
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        form = described["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["required"] == ["file"]
        json = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert json["required"] == ["input_audio"]
        assert {"input_audio", "model", "timestamp_granularities"} <= json["properties"].keys()
        assert {"file", "model", "language", "stream", "timestamp_granularities[]"} <= form["properties"].keys()
