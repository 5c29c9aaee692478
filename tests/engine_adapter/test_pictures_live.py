"""Pictures through router, adapter and mock engine, all processes: answered, placed by what is cached, and not lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.engine_adapter.fleet import SERVED, Fleet, fleet
from tests.engine_adapter.test_adapter_live import busiest, mirrored, wait_until_ready
from tests.local_cluster import scrape, value
from tests.router.media import pictures as made
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STEP_S = 0.02
SEES: tuple[list[str], ...] = (["image", "audio"], ["image"], [])
CAT, DOG, BIRD = (made.data_url(made.png(colour=shade), made.PNG) for shade in (10, 200, 99))
WORDS = "Look closely at what this picture shows, and then say it in a few words. " * 2


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    """Two engines that see, and one that reads text alone."""
    with fleet() as started:
        for modalities in SEES:
            started.add(step_s=STEP_S, modalities=modalities, hears="audio" in modalities)
        started.start_router("smollm2", "--allowed-media-domains", "127.0.0.1,localhost,169.254.169.254,::1")
        started.ready(3)
        for engine in started.engines:
            wait_until_ready(engine)
        yield started


@dataclass
class Told:
    """A streamed chat: its token ids, and what its last chunks say."""

    tokens: list[int] = field(default_factory=list)
    route: str = ""
    error: Any = None
    usage: dict[str, Any] = field(default_factory=dict)


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(running: Fleet, *parts: Any, question: str = "", count: int = 8, **more: Any) -> Told:
    """Stream a chat about the parts to its end."""
    messages = [{"role": "user", "content": [{"type": "text", "text": WORDS}, *parts,
                                             {"type": "text", "text": question}]}]  # fmt: skip
    body = {"model": SERVED, "messages": messages, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **more}  # fmt: skip
    told = Told()
    with httpx.stream("POST", f"{running.router_url}/v1/chat/completions", json=body, timeout=60) as answer:
        told.route = answer.headers.get("x-kvferry-route", "")
        if answer.status_code != 200:
            told.error = {"status": answer.status_code, **json.loads(answer.read())["error"]}
            return told
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                told.error = chunk.get("error") or told.error
                told.usage = chunk.get("usage") or told.usage
                for choice in chunk.get("choices", ()):
                    told.tokens += choice.get("token_ids") or []
    return told


def rendered(running: Fleet) -> int:
    return sum(len(engine.behave()["rendered"]) for engine in running.engines)


def test_questions_about_a_picture_are_answered_by_engines_that_see_it(running: Fleet):
    answers = [ask(running, picture(url), question=f"Number {at}") for at in range(4) for url in (CAT, DOG)]
    assert [answer.error for answer in answers] == [None] * 8
    assert len({tuple(answer.tokens) for answer in answers}) == 8
    blind = running.engines[2]
    assert not any(blind.name in answer.route for answer in answers)
    assert not blind.behave()["asked"][-1].get("features")


def test_a_second_question_about_a_picture_goes_where_it_is_cached(running: Fleet):
    """The same text with another picture shares nothing behind the picture."""
    first = ask(running, picture(CAT), question="What is it?" * 30)
    prompt_tokens = first.usage["prompt_tokens"]
    wait_for(lambda: sum(mirrored(engine, "blocks") for engine in running.engines[:2]) > prompt_tokens // 16)
    answers = [ask(running, picture(CAT), question="What is it?" * 30, count=count) for count in (4, 5, 6)]
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [(prompt_tokens - 1) // 16 * 16] * 3
    assert len({answer.route.partition("decode=")[2].split()[0] for answer in (first, *answers)}) == 1
    other = ask(running, picture(BIRD), question="What is it?" * 30)
    assert other.usage["prompt_tokens_details"]["cached_tokens"] == len("<user>" + WORDS) // 16 * 16
    assert not sum(value(scrape(each.adapter_url), "kvferry_mirror_difference_tokens") for each in running.engines)


def test_a_stream_about_a_picture_goes_on_where_its_engine_died(running: Fleet):
    undisturbed = [ask(running, picture(CAT), question=f"Of {at}", count=100) for at in range(3)]
    answers = [Told() for _ in undisturbed]

    def run(at: int) -> None:
        answers[at] = ask(running, picture(CAT), question=f"Of {at}", count=100)

    before = rendered(running)
    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(30 * STEP_S)
    victim = busiest(running)
    assert victim.behave()["running"] > 0
    victim.server.popen.kill()
    for thread in threads:
        thread.join(60)
    assert [answer.error for answer in answers] == [None] * 3
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in undisturbed]
    left = [engine for engine in running.engines if engine is not victim]
    assert sum(len(engine.behave()["rendered"]) for engine in left) <= before + 3
    restarted_seer(running, victim)


def restarted_seer(running: Fleet, victim: Any) -> None:
    victim.adapter.end()
    victim.server.end()
    place = running.engines.index(victim)
    running.add(step_s=STEP_S, modalities=SEES[place], hears="audio" in SEES[place])
    running.engines[place] = running.engines.pop()
    wait_until_ready(running.engines[place])
    running.ready(3)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:6379/", "port"),
        ("http://127.0.0.1/a.png", "not public"),
        ("http://169.254.169.254/latest/meta-data/", "not public"),
        ("http://[::1]/a.png", "not public"),
        ("http://localhost/a.png", "not public"),
        ("http://elsewhere.example/a.png", "not in --allowed-media-domains"),
        ("file:///etc/passwd", "http or https"),
        (made.data_url(made.png_header(60_000, 60_000), made.PNG), "60000 x 60000 pixels"),
        (CAT[:-1], "not valid base64"),
        (CAT.replace("image/png", "image/webp"), "first bytes are those of image/png"),
    ],
)
def test_what_must_not_be_fetched_or_decoded_is_refused(running: Fleet, url: str, why: str):
    before = rendered(running)
    error = ask(running, picture(url)).error
    assert (error["status"], error["param"]) == (400, "messages[0].content[1].image_url.url")
    assert why in error["message"]
    assert rendered(running) == before


def test_more_is_refused_by_name(running: Fleet):
    error = ask(running, *[picture(CAT)] * 1000).error
    assert (error["status"], error["param"]) == (400, "messages[0].content[33]")
    video = {"type": "video_url", "video_url": {"url": made.data_url(made.MP4, "video/mp4")}}
    error = ask(running, video).error
    assert (error["status"], error["param"]) == (400, "messages[0].content[1]")
    assert "no node of the model takes video" in error["message"]


def test_sound_goes_to_the_engine_that_hears(running: Fleet):
    sound = {"type": "input_audio", "input_audio": {"data": made.data_url(made.wav(), "").partition(",")[2],
             "format": "wav"}}  # fmt: skip
    answers = [ask(running, sound, picture(CAT), question=f"Again {at}") for at in range(3)]
    assert [answer.error for answer in answers] == [None] * 3
    assert all(running.engines[0].name in answer.route for answer in answers)
    (features,) = {json.dumps(body["features"]["mm_hashes"]) for body in running.engines[0].behave()["asked"][-3:]}
    assert {name: len(hashes) for name, hashes in json.loads(features).items()} == {"audio": 1, "image": 1}


def transcribe(running: Fleet, name: str = "transcriptions", data: bytes = b"", **fields: Any) -> httpx.Response:
    files = {"file": ("talk.wav", data or made.wav(), "audio/wav")}
    url = f"{running.router_url}/v1/audio/{name}"
    return httpx.post(url, files=files, data={"model": SERVED, **fields}, timeout=30)


def test_speech_is_written_down_by_the_engine_that_hears(running: Fleet):
    size = len(made.wav())
    told = transcribe(running, temperature="0.5", language="en").json()
    assert told["text"] == f"/v1/audio/transcriptions talk.wav {size}"
    assert told["fields"] == {"model": ["toy"], "response_format": ["json"], "temperature": ["0.5"], "language": ["en"]}
    plain = transcribe(running, "translations", response_format="text")
    assert plain.headers["content-type"].startswith("text/plain")
    assert plain.text == f"/v1/audio/translations talk.wav {size}"
    streamed = transcribe(running, stream="true")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert [line for line in streamed.text.split("\n\n") if line][-1] == "data: [DONE]"
    assert streamed.text.count("delta") == 3


def test_what_the_engine_refuses_or_breaks_off_is_told(running: Fleet):
    refused = transcribe(running, prompt="fail")
    assert (refused.status_code, "cannot hear" in refused.text) == (400, True)
    broken = transcribe(running, stream="true", prompt="break")
    assert broken.status_code == 200
    assert "delta" in broken.text
    assert "node_lost" in broken.text
    assert "[DONE]" not in broken.text
    assert transcribe(running).status_code == 200
