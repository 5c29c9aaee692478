"""Images in requests of the Responses and the Messages API: they reach the engine as a chat's, and errors name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api_parts import error_of
from tests.router.api.test_media_chats import SOUND, TEXT, URL, api_of, prompt
from tests.router.media import pictures as made

DATA = URL.partition(",")[2]
IMAGE = {"type": "image_url", "image_url": {"url": f"data:{made.PNG};base64,"}}
"""What an engine gets, whose data are the file after the chat."""
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
INPUT = {"type": "input_image", "image_url": URL, "detail": "low"}
USER = {"role": "user"}
IMAGE_NOTE = "(image: see the next message)"
CALL_ID = "toolu_1"


def messages(*turns: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 9, "messages": [*turns]}


def responses(*items: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [*items]}


def used(*results: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call and its results in the Messages API."""
    call = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}
    found = [{"type": "tool_result", "tool_use_id": CALL_ID, "content": each} for each in results]
    return {"role": "assistant", "content": [call]}, {**USER, "content": found}


def called(*results: Any) -> list[dict[str, Any]]:
    """A call and its results in the Responses API."""
    call = {"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}"}
    return [call, *({"type": "function_call_output", "call_id": CALL_ID, "output": each} for each in results)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        messages({**USER, "content": [TEXT, BLOCK]}),
        responses({**USER, "content": [{"type": "input_text", "text": TEXT["text"]}, INPUT]}),
    ],
)
async def test_pictures_of_other_apis_reach_the_engine_in_a_chats_form(path: str, body: dict[str, Any]):
    api = api_of("image")
    answer = await api.http.post(path, json={"model": "SmolLM2-135M-Instruct", **body})
    assert (answer.status_code, "A cat." in answer.text) == (200, True)
    (request,) = api.cluster.media.asked
    (message,) = json.loads(request.chat)["messages"]
    assert (message["content"], request.files) == ([TEXT, IMAGE], (made.png(),))
    blind = api_of()
    refused = await blind.http.post(path, json={"model": "SmolLM2-135M-Instruct", **body})
    assert (refused.status_code, "no node of the model takes image" in refused.text) == (400, True)


async def test_audio_of_the_responses_api_reaches_the_engine_in_a_chats_form_also_from_a_stored_response():
    api = api_of("audio", answers=[prompt(), prompt()])
    content = [SOUND, {"type": "input_text", "text": TEXT["text"]}]
    first = await api.http.post("/v1/responses", json={"input": [{**USER, "content": content}]})
    assert first.status_code == 200, first.text
    body = {"input": "And?", "previous_response_id": first.json()["id"]}
    assert (await api.http.post("/v1/responses", json=body)).status_code == 200
    heard = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}
    for request in api.cluster.media.asked:
        assert json.loads(request.chat)["messages"][0]["content"] == [heard, TEXT]
        assert request.files == (made.wav(),)
    assert len(api.cluster.media.asked) == 2
    damaged = {**SOUND, "input_audio": {"data": "UklGRg", "format": "wav"}}
    error = error_of(await api.http.post("/v1/responses", json={"input": [{**USER, "content": [damaged]}]}))
    assert error["param"] == "input[0].content[0].input_audio.data"


@pytest.mark.parametrize(
    ("path", "body", "results", "last"),
    [
        (*messages({**USER, "content": "Look."}, *used([TEXT, BLOCK])), [f"{TEXT['text']}\n{IMAGE_NOTE}"], [IMAGE]),
        (*messages({**USER, "content": "Look."}, *used([BLOCK], "none")), [IMAGE_NOTE, "none"], [IMAGE]),
        (*responses({**USER, "content": "Look."}, *called([INPUT])), [IMAGE_NOTE], [IMAGE]),
        (*responses({**USER, "content": "Look."}, *called([INPUT], "none"), {**USER, "content": TEXT["text"]}),
         [IMAGE_NOTE, "none"], [IMAGE, TEXT]),
        (*responses({**USER, "content": "Look."}, *called([INPUT]), {"role": "system", "content": "Brief."}),
         [IMAGE_NOTE], [IMAGE]),
    ],
)  # fmt: skip
async def test_images_in_results_of_tools_go_into_the_next_message(
    path: str, body: dict[str, Any], results: list[str], last: list[Any]
):
    api = api_of("image")
    assert (await api.http.post(path, json=body)).status_code == 200
    found = json.loads(api.cluster.media.asked[0].chat)["messages"]
    assert [each["content"] for each in found if each["role"] == "tool"] == results
    assert [each["content"] for each in found if each["role"] == "user"] == ["Look.", last]


async def test_a_stored_response_keeps_its_picture_for_the_next_turn():
    api = api_of("image", answers=[prompt(), prompt()])
    first = await api.http.post("/v1/responses", json={"input": [{**USER, "content": [INPUT]}]})
    kept = await api.http.get(f"/v1/responses/{first.json()['id']}/input_items")
    assert kept.json()["data"][0]["content"] == [INPUT]
    again = await api.http.post("/v1/responses", json={"input": "And now?", "previous_response_id": first.json()["id"]})
    assert again.status_code == 200
    picture, _, text = json.loads(api.cluster.media.asked[1].chat)["messages"]
    assert picture["content"] == [IMAGE]
    assert text["content"] == "And now?"


async def test_tokens_of_messages_with_images_are_counted_by_an_engine():
    path, body = messages({**USER, "content": [TEXT, BLOCK]})
    del body["max_tokens"]
    api = api_of("image")
    counted = await api.http.post(f"{path}/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(prompt().token_ids)}
    assert api.cluster.dispatches == []
    assert (await api_of().http.post(f"{path}/count_tokens", json=body)).status_code == 400


HUGE = made.data_url(made.png_header(60_000, 60_000), made.PNG)
HUGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": made.PNG, "data": HUGE.partition(",")[2]}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (*messages({**USER, "content": [TEXT, HUGE_BLOCK]}), "messages[0].content[1].source.data"),
        (*messages({**USER, "content": "Look."}, *used([TEXT, HUGE_BLOCK])),
         "messages[2].content[0].content[1].source.data"),
        (*messages({**USER, "content": [{"type": "image", "source": {"type": "url", "url": "http://a.b"}}]}),
         "messages[0].content[0].source.url"),
        (*messages({**USER, "content": [BLOCK] * 40}), "messages[0].content[32].source.data"),
        (*responses({**USER, "content": [INPUT, {**INPUT, "image_url": HUGE}]}), "input[0].content[1].image_url"),
        (*responses(*called([{**INPUT, "image_url": HUGE}])), "input[1].output[0].image_url"),
    ],
)  # fmt: skip
async def test_errors_name_the_image_where_the_client_wrote_it(path: str, body: dict[str, Any], field: str):
    api = api_of("image")
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)
    if path == "/v1/responses":
        assert error_of(answer)["param"] == field
    assert api.cluster.media.asked == []
