"""A cluster that transcribes: every form over openai's client, refusals, a client that leaves and a node that dies."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.engine.speech.conftest import noise
from tests.engine.speech.test_transcriber import wav
from tests.engine.speech.tiny_whisper import make_tiny_whisper
from tests.local_cluster import LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
AUDIO = wav(noise(1.3))
ONCE = 0.01
"""Temperature that has no others tried after it: whatever the tiny model writes looks wrong."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes of a tiny Whisper."""
    path = make_tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny")
    arguments = ("--threads", "1", "--dtype", "float32", "--max-audio-seconds", "20", "--decode", "2")
    with local_cluster("--model", str(path), *arguments) as made:
        yield made


def ask(cluster: LocalCluster, data: bytes = AUDIO, path: str = "transcriptions", **fields: str) -> httpx.Response:
    form = {"model": "tiny", "language": "en", "temperature": str(ONCE), **fields}
    files = {"file": ("a.wav", data)}
    return httpx.post(f"{cluster.url}/v1/audio/{path}", data=form, files=files, timeout=60)


def test_every_form_over_openai_python(cluster: LocalCluster) -> None:
    def file() -> io.BytesIO:
        made = io.BytesIO(AUDIO)
        made.name = "a.wav"
        return made

    create: Any = partial(cluster.client.audio.transcriptions.create, model="tiny", temperature=ONCE)
    plain = create(file=file(), language="en")
    verbose = create(
        file=file(), language="en", response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert verbose.text == plain.text
    assert verbose.duration == pytest.approx(1.3)
    assert verbose.language == "english"
    assert verbose.segments
    assert "".join(each.text for each in verbose.segments).strip() == plain.text
    assert verbose.words
    assert all(0 <= word.start <= word.end <= 2.3 for word in verbose.words)
    assert create(file=file(), language="en", response_format="srt").startswith("1\n00:00:0")
    assert create(file=file(), language="en", response_format="vtt").startswith("WEBVTT\n\n00:00:0")
    events = list(create(file=file(), language="en", stream=True))
    assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == plain.text
    assert create(file=file()).text, "its language is detected"
    with pytest.raises(openai.BadRequestError, match="response_format verbose_json"):
        create(file=file(), timestamp_granularities=["word"])


def test_the_model_is_listed_as_one_that_transcribes(cluster: LocalCluster) -> None:
    (model,) = httpx.get(f"{cluster.url}/v1/models", timeout=10).json()["data"]
    assert (model["id"], model["transcription"]) == ("tiny", True)
    assert "audio/transcriptions" in cluster.ready_line


def test_a_translation_has_another_prompt(cluster: LocalCluster) -> None:
    assert ask(cluster, path="translations").json()["text"] != ask(cluster).json()["text"]


def test_refusals_name_their_field(cluster: LocalCluster) -> None:
    for data, fields, param, told in (
        (wav(noise(21.0)), {}, "file", "must not be longer than 20 s"),
        (AUDIO[:44], {}, "file", "no samples"),
        (AUDIO, {"language": "tlh"}, "language", "not one of the model's"),
        (b"OggS" + bytes(64), {}, "file", "cannot be decoded"),
    ):
        answer = ask(cluster, data, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert told in error["message"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    for path in ("chat/completions", "completions", "embeddings"):
        answer = httpx.post(f"{cluster.url}/v1/{path}", json=chat, timeout=30)
        assert answer.status_code == 400
        assert "it transcribes speech" in answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_blocks(cluster: LocalCluster) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            files, form = (
                {"file": ("a.wav", wav(noise(19.0)))},
                {"model": "tiny", "stream": "true", "language": "en", "temperature": ONCE},
            )
            async with client.stream(
                "POST", f"{cluster.url}/v1/audio/transcriptions", data=form, files=files
            ) as answer:
                assert answer.status_code == 200
                await anext(answer.aiter_bytes())

    asyncio.run(leave())
    for url in cluster.worker_urls("decode"):
        wait_for(lambda url=url: value(scrape(url), "kvferry_kv_blocks", state="active") == 0)


def test_a_file_goes_on_at_another_node(cluster: LocalCluster) -> None:
    """Nothing was delivered when the node died, so the whole file is asked for again."""
    data, answers = wav(noise(19.0)), list[httpx.Response]()
    expected = ask(cluster, data).json()["text"]

    def busy() -> str:
        for lease in cluster.leases():
            if value(scrape(lease.http_url), "kvferry_requests_running"):
                return lease.node_id
        return ""

    for _ in range(20):  # on a busy machine it may end before anybody looks
        asking = threading.Thread(target=lambda: answers.append(ask(cluster, data)))
        asking.start()
        while not (found := busy()) and asking.is_alive():
            pass
        if found:
            break
        asking.join(60)
        answers.clear()
    cluster.worker(found).kill()
    asking.join(60)
    assert answers[0].status_code == 200, answers[0].text
    assert json.loads(answers[0].text)["text"] == expected
