"""Chats with images and audio: refused by name where no node takes them, else prompted by an engine."""

from __future__ import annotations

import gc
import json
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import InvalidRequest, NoNodes
from kvferry.protocol.media import MediaItem
from kvferry.router.dispatch.interface import PromptMedia, RenderedMedia
from kvferry.router.media.prompting import MediaBudget
from tests.api_parts import Api, FakeCluster, error_of, ids_of, says
from tests.router.media import pictures as made

URL = made.data_url(made.png(), made.PNG)
PICTURE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "mine"}
SOUND = {"type": "input_audio", "input_audio": {"data": made.data_url(made.wav(), "").partition(",")[2],
         "format": "wav"}}  # fmt: skip
TEXT = {"type": "text", "text": "What is it?"}


def chat(*parts: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [TEXT, *parts], **more}]


def prompt(size: int = 3) -> RenderedMedia:
    ids = ids_of("a prompt with a picture in it")
    return RenderedMedia(tuple(ids), PromptMedia((MediaItem("image", "hash", 1, 2, b"x" * size),), "fingerprint"))


def api_of(*modalities: str, answers: Any = None, **settings: Any) -> Api:
    cluster = FakeCluster(says("A cat."))
    cluster.media.takes, cluster.media.answers = modalities, [prompt()] if answers is None else answers
    return Api(cluster, **settings)


@pytest.mark.parametrize("part", [PICTURE, SOUND, {"type": "video_url", "video_url": {"url": "data:"}}])
async def test_media_are_refused_by_name_where_no_node_takes_them(part: dict[str, Any]):
    api = api_of()
    error = error_of(await api.chat(messages=chat(part)))
    assert error["param"] == "messages[0].content[1]"
    assert f"content parts of type {part['type']!r} are not supported: no node of the model takes" in error["message"]
    assert api.cluster.media.asked == []
    assert api.cluster.dispatches == []


async def test_a_medium_that_no_node_takes_is_named_among_others():
    api = api_of("image")
    error = error_of(await api.chat(messages=chat(PICTURE, SOUND, PICTURE)))
    assert error["param"] == "messages[0].content[2]"
    assert "takes audio" in error["message"]


async def test_the_list_of_models_says_which_media_they_take():
    for api, taken in ((api_of(), []), (api_of("video", "transcription", "image"), ["image", "video"])):
        (model,) = (await api.http.get("/v1/models")).json()["data"]
        assert model["input_modalities"] == ["text", *taken]


async def test_a_chat_with_a_picture_is_answered_from_the_engines_prompt():
    api = api_of("image")
    asked = [{"role": "system", "content": "Be brief."}, *chat(PICTURE, name="me"),
             {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []}, *chat()]  # fmt: skip
    answer = await api.chat(messages=asked, chat_template_kwargs={"loud": True}, kv_transfer_params={"a": 1})
    assert answer.json()["choices"][0]["message"]["content"] == "A cat."
    (request,) = api.cluster.media.asked
    assert json.loads(request.chat) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": URL}}], "name": "me"},
            {"role": "assistant", "content": "", "reasoning": "hm"},
            {"role": "user", "content": [TEXT]},
        ],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {"loud": True},
    }
    assert 0 < request.deadline_s <= 600
    (dispatch,) = api.cluster.dispatches
    assert dispatch.spec.token_ids == prompt().token_ids
    assert dispatch.spec.media is not None
    assert dispatch.spec.media.fingerprint == "fingerprint"
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt().token_ids)


async def test_all_choices_share_the_prompt():
    api = api_of("image")
    answer = await api.chat(messages=chat(PICTURE), n=3)
    assert len(answer.json()["choices"]) == 3
    assert len(api.cluster.media.asked) == 1
    assert len({id(each.spec.media) for each in api.cluster.dispatches}) == 1


DATA = URL.partition(",")[2]
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT, ANTHROPIC]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT["text"]},
                                                                  {"type": "input_image", "image_url": URL}]}]}),
    ],
)  # fmt: skip
async def test_pictures_of_other_apis_reach_the_engine_in_a_chats_form(path: str, body: dict[str, Any]):
    api = api_of("image")
    answer = await api.http.post(path, json={"model": "SmolLM2-135M-Instruct", **body})
    assert (answer.status_code, "A cat." in answer.text) == (200, True)
    (request,) = api.cluster.media.asked
    (message,) = json.loads(request.chat)["messages"]
    assert message["content"] == [TEXT, {"type": "image_url", "image_url": {"url": URL}}]
    blind = api_of()
    refused = await blind.http.post(path, json={"model": "SmolLM2-135M-Instruct", **body})
    assert (refused.status_code, "no node of the model takes image" in refused.text) == (400, True)


async def test_a_stored_response_keeps_its_picture_for_the_next_turn():
    api = api_of("image", answers=[prompt(), prompt()])
    first = await api.http.post("/v1/responses", json={"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": URL}]}]})  # fmt: skip
    again = await api.http.post("/v1/responses", json={"input": "And now?", "previous_response_id": first.json()["id"]})
    assert again.status_code == 200
    picture, _, text = json.loads(api.cluster.media.asked[1].chat)["messages"]
    assert picture["content"] == [{"type": "image_url", "image_url": {"url": URL}}]
    assert text["content"] == "And now?"


async def test_text_alone_never_asks_an_engine():
    api = api_of("image")
    answer = await api.chat(messages=[{"role": "user", "content": [TEXT]}])
    assert answer.status_code == 200
    assert api.cluster.media.asked == []
    assert api.cluster.dispatches[0].spec.media is None


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"messages": chat({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}})},
         "messages[0].content[1].image_url.url", "fetches nothing"),
        ({"messages": chat({"type": "image_url", "image_url": {"url": made.data_url(made.png_header(60_000, 60_000),
                                                                                   made.PNG)}})},
         "messages[0].content[1].image_url.url", "60000 x 60000 pixels"),
        ({"messages": chat(*[PICTURE] * 1000)}, "messages[0].content[33]", "at most 32"),
        ({"messages": chat(PICTURE, {"type": "file", "file": {}})}, "messages[0].content[2]", "'file'"),
        ({"messages": chat(PICTURE, {"type": "text", "text": 5})}, "messages[0].content[2].text", "string"),
        ({"messages": [{"role": "usr", "content": [PICTURE]}]}, "messages[0].role", "must be one of"),
        ({"messages": chat(PICTURE), "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"messages": chat(PICTURE), "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs",
         "must not set chat_template"),
        ({"messages": chat(PICTURE), "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs",
         "must not set messages"),
        ({"messages": chat(PICTURE), "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools",
         "template that shows tools"),
        ({"messages": chat(PICTURE, tool_calls=[{"function": {"name": "f"}}])}, "messages[0].tool_calls[0]",
         "name and arguments"),
        ({"messages": [*chat(PICTURE), {"role": "user", "content": "word " * 9000}]}, "messages", "context length"),
        ({"messages": chat(PICTURE), "max_tokens": 5000}, "max_tokens", "context length"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str, why: str):
    api = api_of("image")
    answer = await api.http.post("/v1/chat/completions", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert why in error["message"]
    assert api.cluster.dispatches == []


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [(InvalidRequest("the engine answered 400: odd picture"), 400, "messages"), (NoNodes("none"), 503, None)],
)
async def test_what_an_engine_refuses_reaches_the_client(error: Any, status: int, param: str | None):
    api = api_of("image", answers=[error])
    answer = await api.chat(messages=chat(PICTURE))
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


async def test_a_stream_begins_like_any_other():
    api = api_of("image")
    answer = await api.chat(messages=chat(PICTURE), stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert '"content":"A"' in answer.text.replace('": "', '":"')


async def test_prepared_media_are_counted_until_the_request_ends(monkeypatch: pytest.MonkeyPatch):
    budgets: list[MediaBudget] = []
    monkeypatch.setattr(
        "kvferry.router.media.prompting.MediaBudget", lambda: budgets.append(MediaBudget(100)) or budgets[-1]
    )
    api = api_of("image", answers=[prompt(60), prompt(60), prompt(101)])
    for _ in range(2):
        assert (await api.chat(messages=chat(PICTURE))).status_code == 200
        api.cluster.dispatches.clear()
        gc.collect()
        assert budgets[0].held == 0
    assert (await api.chat(messages=chat(PICTURE))).status_code == 429


def test_one_tenant_fills_at_most_half_of_the_budget():
    budget, held = MediaBudget(100), [prompt(40).media, prompt(20).media, prompt(40).media]
    budget.hold("one", held[0])
    with pytest.raises(Exception, match="fill their share"):
        budget.hold("one", held[1])
    budget.hold("two", held[2])
    with pytest.raises(Exception, match="fill their share"):
        budget.check("", 21)
    assert budget.held == 80
    held.clear()
    assert budget.held == 0


async def test_other_endpoints_refuse_media_by_name():
    api = api_of("image")
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        answer: httpx.Response = await api.http.post(path, json={"messages": chat(PICTURE)})
        assert answer.status_code == 400
        assert "image_url" in answer.text
