"""What Open WebUI sends is understood: its model list, chats with tools, background tasks, and embeddings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvferry.protocol.media import TRANSCRIPTION, MediaItem
from kvferry.protocol.speech import SpeechPart
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from tests.api_parts import Api, FakeCluster, demo_text, error_of, events, ids_of, says
from tests.router.media import pictures

MODEL = "SmolLM2-135M-Instruct"
HEADERS = {
    "authorization": "Bearer k",
    "content-type": "application/json",
    "x-openwebui-auth-type": "jwt",
    "x-openwebui-user-name": "Ada",
    "x-openwebui-user-id": "5f2c",
    "x-openwebui-user-email": "ada@example.org",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "9d1e",
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {
    "type": "object", "properties": {"__zone": {"type": "string"}}, "required": ["__zone"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "clock", "arguments": {"__zone": "UTC"}}\n</tool_call>'


def webui(text: str = "Fine.", **more: Any) -> Api:
    return Api(FakeCluster(says(text), max_model_len=4096), api_key="k", **more)


async def posted(api: Api, path: str, **body: Any) -> httpx.Response:
    return await api.http.post(f"/v1/{path}", json={"model": MODEL, **body}, headers=HEADERS)


def chat(*further: dict[str, Any]) -> list[dict[str, Any]]:
    asked = [{"type": "text", "text": "Hello"}]
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": asked}, *further]


async def test_the_connection_is_verified_by_the_list_of_models() -> None:
    api = webui()
    answer = await api.http.get("/v1/models", headers=HEADERS)
    assert [(each["id"], each["object"]) for each in answer.json()["data"]] == [(MODEL, "model")]
    assert (await api.http.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401


async def test_a_chat_is_streamed_with_its_usage() -> None:
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_k": 40,
        "user": "5f2c",
    }
    *_, ending, usage, done = events(await posted(webui(), "chat/completions", messages=chat(), **fields))
    assert ending["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"]["total_tokens"] > 0


async def test_native_tools_are_called_and_their_results_come_back() -> None:
    api = webui(CALL)
    answer = await posted(api, "chat/completions", messages=chat(), tools=[CLOCK], stream=True)
    deltas = [
        call
        for event in events(answer)[:-1]
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert json.loads("".join(call["function"]["arguments"] for call in deltas)) == {"__zone": "UTC"}
    called = {
        "index": 0,
        "id": deltas[0]["id"],
        "type": "function",
        "function": {"name": "clock", "arguments": '{"__zone": "UTC"}'},
    }
    history = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": called["id"], "content": "noon"},
    ]
    assert (
        await posted(api, "chat/completions", messages=chat(*history), tools=[CLOCK], stream=True)
    ).status_code == 200
    first, second = (dispatch.spec.token_ids for dispatch in api.cluster.dispatches)
    assert second[: len(first)] == first
    assert "noon" in demo_text().tokenizer.decode(second)


@pytest.mark.parametrize("bound", [{"max_completion_tokens": 1000}, {"max_tokens": 1000}, {}])
async def test_titles_and_tags_are_asked_for_in_the_background(bound: dict[str, int]) -> None:
    asked = [{"role": "user", "content": "### Task:\nName the chat.\n<chat_history>\nUSER: Hello\n</chat_history>"}]
    answer = await posted(webui('{"title": "Hello"}'), "chat/completions", messages=asked, stream=False, **bound)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"title": "Hello"}


async def test_documents_are_embedded() -> None:
    answer = await posted(webui(), "embeddings", input=["one", "two"], encoding_format="float")
    assert [each["index"] for each in answer.json()["data"]] == [0, 1]


async def test_an_error_has_a_message_to_show() -> None:
    answer = await posted(webui(), "chat/completions", messages=chat(), model="other")
    assert answer.status_code == 404
    assert "does not exist" in error_of(answer)["message"]


async def test_pictures_are_parts_of_a_chat() -> None:
    api = webui()
    ids = tuple(ids_of("a prompt with a picture in it"))
    api.cluster.media.takes = ("image",)
    api.cluster.media.answers = [RenderedMedia(ids, PromptMedia((MediaItem("image", "hash", 1, 2, b"x"),), "fp"))]
    part = {"type": "image_url", "image_url": {"url": pictures.data_url(pictures.png(), pictures.PNG)}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    assert (await posted(api, "chat/completions", messages=asked, stream=False)).status_code == 200
    assert len(api.cluster.media.asked) == 1


async def test_speech_comes_as_a_form_of_unknown_length_and_type() -> None:
    """aiohttp writes it while the file is read."""
    api = webui()
    api.cluster.media.takes = (TRANSCRIPTION,)
    api.cluster.media.speech = [SpeechPart(b'{"text":"hello"}', "application/json")]

    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
        yield MODEL.encode() + b"\r\n--b\r\nContent-Type: application/octet-stream\r\n"
        yield b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        for start in range(0, len(sound), 100):
            yield sound[start : start + 100]
        yield b"\r\n--b--\r\n"

    sound = pictures.wav()
    headers = {**HEADERS, "content-type": "multipart/form-data; boundary=b"}
    answer = await api.http.post("/v1/audio/transcriptions", content=form(), headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"text": "hello"})
    assert api.cluster.media.heard[0].audio == sound


async def test_a_client_of_its_messages_api_counts_tokens_with_the_same_body() -> None:
    answer = await posted(webui(), "messages/count_tokens", messages=[{"role": "user", "content": "Hi"}], max_tokens=20)
    assert answer.json()["input_tokens"] > 0
