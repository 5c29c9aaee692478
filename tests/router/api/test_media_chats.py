"""Chats with images and audio: refused by name where no node takes them, else prompted by an engine."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import InvalidRequest, NoNodes
from kvferry.protocol.media import MediaItem
from kvferry.protocol.settings import RouterSettings
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from kvferry.router.media.prompting import MediaBudget
from kvferry.router.text.loader import load_text_model
from tests.api_parts import Api, FakeCluster, error_of, ids_of, says
from tests.router.media import pictures as made
from tests.waiting import until

URL = made.data_url(made.png(), made.PNG)
WAITING = len(URL) + len(made.png())
"""Bytes of the picture's text and file, which a request holds until a node has made its prompt."""
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


async def test_messages_with_media_are_tokenized_by_a_node():
    api = api_of("image")
    found = (await api.http.post("/tokenize", json={"messages": chat(PICTURE)})).json()
    ids = list(prompt().token_ids)
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    api = api_of()
    answer = await api.http.post("/tokenize", json={"messages": chat(PICTURE)})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "messages[0].content[1]")
    assert "no node of the model takes image" in error_of(answer)["message"]


async def test_parts_of_other_apis_are_refused_with_those_that_are_known():
    for kind in ("image", "input_image"):
        error = error_of(await api_of("image").chat(messages=chat({"type": kind, "image_url": URL})))
        assert error["param"] == "messages[0].content[1]"
        assert "only text, image_url, input_audio" in error["message"]


async def test_nodes_get_the_chat_template_that_the_router_was_given(tmp_path: Path):
    (file := tmp_path / "chat.jinja").write_text("{{ messages | length }}")
    settings = RouterSettings(chat_template=str(file))
    for given, template in ((settings, "{{ messages | length }}"), (RouterSettings(), "")):
        cluster = FakeCluster(says("A cat."))
        cluster.media.takes, cluster.media.answers = ("image",), [prompt()]
        api = Api(cluster, load_text_model(given), chat_template=given.chat_template)
        assert (await api.chat(messages=chat(PICTURE))).status_code == 200
        assert [request.template for request in cluster.media.asked] == [template]


async def test_a_medium_that_no_node_takes_is_named_among_others():
    api = api_of("image")
    error = error_of(await api.chat(messages=chat(PICTURE, SOUND, PICTURE)))
    assert error["param"] == "messages[0].content[2]"
    assert "takes audio" in error["message"]


async def test_the_list_of_models_says_which_media_they_take():
    for api, taken in ((api_of(), []), (api_of("video", "transcription", "image"), ["image", "video"])):
        (model,) = (await api.http.get("/v1/models")).json()["data"]
        assert (model["input_modalities"], model["transcription"]) == (["text", *taken], bool(taken))


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
            {
                "role": "user",
                "content": [TEXT, {"type": "image_url", "image_url": {"url": f"data:{made.PNG};base64,"}}],
                "name": "me",
            },
            {"role": "assistant", "content": "", "reasoning": "hm"},
            {"role": "user", "content": [TEXT]},
        ],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {"loud": True},
    }
    assert request.files == (made.png(),)
    assert 0 < request.deadline_s <= 600
    (dispatch,) = api.cluster.dispatches
    assert dispatch.spec.token_ids == prompt().token_ids
    assert dispatch.spec.media is not None
    assert dispatch.spec.media.fingerprint == "fingerprint"
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt().token_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 2}


async def test_all_choices_share_the_prompt():
    api = api_of("image")
    answer = await api.chat(messages=chat(PICTURE), n=3)
    assert len(answer.json()["choices"]) == 3
    assert len(api.cluster.media.asked) == 1
    assert len({id(each.spec.media) for each in api.cluster.dispatches}) == 1


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
        ({"messages": chat(*[PICTURE] * 1000)}, "messages[0].content[33]", "beyond the 32 images"),
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
    budget = budget_of(monkeypatch, 100 + WAITING)
    api = api_of("image", answers=[prompt(60), prompt(60), prompt(101)])
    for _ in range(2):
        assert (await api.chat(messages=chat(PICTURE))).status_code == 200
        api.cluster.dispatches.clear()
        gc.collect()
        assert budget.held == 0
    assert (await api.chat(messages=chat(PICTURE))).status_code == 429


async def test_media_of_waiting_requests_are_counted_as_they_were_sent_and_decoded(monkeypatch: pytest.MonkeyPatch):
    budget, go = budget_of(monkeypatch, 2 * WAITING + 2 * 3), asyncio.Event()
    api = api_of("image", answers=[prompt(), prompt(), prompt()])
    make = api.cluster.media.render

    async def render(*asked: Any) -> RenderedMedia:
        await go.wait()
        return await make(*asked)

    monkeypatch.setattr(api.cluster.media, "render", render)
    waiting = [asyncio.create_task(api.chat(messages=chat(PICTURE))) for _ in range(2)]
    await until(lambda: budget.held == 2 * WAITING)
    assert (await api.chat(messages=chat(PICTURE))).status_code == 429
    go.set()
    assert [(await each).status_code for each in waiting] == [200, 200]
    del waiting
    api.cluster.dispatches.clear()
    gc.collect()
    assert budget.held == 0


async def test_a_request_does_not_wait_for_a_node_beyond_its_deadline(monkeypatch: pytest.MonkeyPatch):
    api = api_of("image", request_timeout=0.3)

    async def render(*asked: Any) -> RenderedMedia:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(api.cluster.media, "render", render)
    answers = await asyncio.gather(*(api.chat(messages=chat(PICTURE)) for _ in range(6)))
    assert [(each.status_code, error_of(each)["code"]) for each in answers] == [(504, "deadline_exceeded")] * 6


def budget_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> MediaBudget:
    """The budget of the application that is made next."""
    budget = MediaBudget(limit)
    monkeypatch.setattr("kvferry.router.media.prompting.MediaBudget", lambda: budget)
    return budget


def test_one_tenant_fills_at_most_half_of_the_budget_and_no_two_fill_all():
    budget, held = MediaBudget(100), [prompt().media for _ in range(3)]
    budget.hold("one", held[0], 40)
    with pytest.raises(Exception, match="fill their share"):
        budget.hold("one", held[1], 20)
    budget.hold("two", held[2], 40)
    with pytest.raises(Exception, match="fill their share"):
        budget.check("two", 9)
    with pytest.raises(Exception, match="fill their share"):
        budget.check("three", 9)
    budget.check("three", 6)
    with pytest.raises(Exception, match="fill their share"):
        budget.check("", 21)
    assert budget.held == 80
    held.clear()
    assert budget.held == 0


async def test_other_endpoints_refuse_media_by_name():
    for path in ("/apply-template", "/v1/chat/completions/render"):
        answer: httpx.Response = await api_of("image").http.post(path, json={"messages": chat(PICTURE)})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "messages[0].content[1]")
        assert "'image_url' are not supported here, only text" in error_of(answer)["message"]
