"""Images and speech on the chat page: attached, kept and sent within bounds, and dictated into the message."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.protocol.errors import StepFailed
from kvferry.protocol.media import TRANSCRIPTION, MediaItem
from kvferry.protocol.speech import SpeechPart
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from tests.api_parts import Api, FakeCluster, ids_of, says, served
from tests.browser import Page
from tests.router.media import pictures
from tests.router.page.chat_tab import ENDED, WIDER, ask, asked, opened, press_button, said

ATTACHED = "document.querySelectorAll('#attached img').length"
NOTICE = "document.getElementById('notice').innerText"
TOLD = "document.getElementById('told').textContent"
LABEL = "document.getElementById('dictate').ariaLabel"
SPOKEN = "new Promise((resolve) => setTimeout(() => resolve(true), 400))"
"""Resolves when a recording has something to transcribe: a beep of the browser's test device."""


def cluster_of(*takes: str, prompts: int = 1) -> FakeCluster:
    cluster = FakeCluster(says("A square."))
    cluster.media.takes = takes
    media = PromptMedia((MediaItem("image", "h", 0, 1, b"x"),), "fp")
    cluster.media.answers = [RenderedMedia(tuple(ids_of("a picture")), media) for _ in range(prompts)]
    return cluster


def picture(tmp_path: Path) -> str:
    path = tmp_path / "picture.png"
    path.write_bytes(pictures.png())
    return str(path)


def choose(page: Page, path: str) -> None:
    found = page.send("Runtime.evaluate", expression="document.getElementById('files')")["result"]["objectId"]
    page.send("DOM.setFileInputFiles", files=[path], objectId=found)


def transfer(page: Page, event: str, target: str, name: str = "a.png", data: bytes = b"") -> bool:
    """A file that is pasted or dropped; whether the page left it to the browser."""
    encoded = base64.b64encode(data or pictures.png()).decode()
    carried = "clipboardData" if event == "ClipboardEvent" else "dataTransfer"
    kind = "paste" if event == "ClipboardEvent" else "drop"
    return bool(page.evaluate(
        f"(() => {{ const {carried} = new DataTransfer();"
        f" const bytes = Uint8Array.from(atob({encoded!r}), (letter) => letter.charCodeAt(0));"
        f" {carried}.items.add(new File([bytes], {name!r}, {{ type: 'image/png' }}));"
        f" return {target}.dispatchEvent(new {event}({kind!r}, {{ {carried}, bubbles: true, cancelable: true }}));"
        " })()"
    ))  # fmt: skip


def kinds(cluster: FakeCluster, number: int = -1) -> list[list[str]]:
    """Types of the content parts of each message of a request for a prompt."""
    body: Any = json.loads(cluster.media.asked[number].chat)
    return [[part["type"] for part in each["content"]] if isinstance(each["content"], list) else ["text"]
            for each in body["messages"]]  # fmt: skip


def test_images_go_along_where_the_model_takes_them(tab: Page, tmp_path: Path) -> None:
    cluster = cluster_of("image")
    with served(Api(cluster).app) as url:
        opened(tab, url)
        assert tab.evaluate("!document.getElementById('attach').hidden")
        choose(tab, picture(tmp_path))
        tab.wait("document.querySelector('#attached img')?.naturalWidth > 0")
        press_button(tab, "Remove image 1")
        assert tab.evaluate(ATTACHED) == 0
        choose(tab, picture(tmp_path))
        tab.wait("document.querySelector('#attached img')?.naturalWidth > 0")
        asked(tab, "What is it?")
        assert said(tab) == ["What is it?", "A square."]
        assert tab.evaluate("document.querySelector('.user img').naturalWidth") > 0
        assert tab.evaluate(ATTACHED) == 0
        tab.reload()
        tab.wait("document.querySelector('.user img')?.naturalWidth > 0")
        assert tab.complaints == []
    assert kinds(cluster) == [["image_url", "text"]]


def test_images_are_pasted_and_dropped(tab: Page) -> None:
    cluster = cluster_of("image")
    with served(Api(cluster).app) as url:
        opened(tab, url)
        assert not transfer(tab, "ClipboardEvent", "document.getElementById('ask')")
        tab.wait(f"{ATTACHED} === 1")
        assert not transfer(tab, "DragEvent", "document.body")
        tab.wait(f"{ATTACHED} === 2")
        assert tab.names()["image"] == ["Image 1", "Image 2"]
        assert {"Remove image 1", "Remove image 2", "Add images"} <= set(tab.names()["button"])
        for width in (1280, 768, 390, 320):
            tab.resize(width, 844)
            assert not tab.evaluate(WIDER)
        ask(tab, "What are they?")
        tab.wait(ENDED)
        assert tab.complaints == []
    assert kinds(cluster) == [["image_url", "image_url", "text"]]


def test_models_without_eyes_get_no_images(tab: Page) -> None:
    cluster = cluster_of("image")
    with served(Api(cluster).app) as url:
        opened(tab, url)
        transfer(tab, "DragEvent", "document.body")
        tab.wait(f"{ATTACHED} === 1")
        asked(tab, "What is it?")
        cluster.media.takes = ()
        tab.evaluate("findModels()")
        tab.wait("document.getElementById('attach').hidden")
        assert transfer(tab, "DragEvent", "document.body"), "the browser does what it does with files"
        asked(tab, "And now?")
        assert "does not see the images" in tab.evaluate(NOTICE)
        assert said(tab)[-1] == "A square."
    assert len(cluster.media.asked) == 1


def test_what_is_no_image_or_does_not_fit_is_named(tab: Page, tmp_path: Path) -> None:
    with served(Api(cluster_of("image")).app) as url:
        opened(tab, url)
        transfer(tab, "DragEvent", "document.body", "notes.png", b"no picture")
        tab.wait(f"{NOTICE}.includes('notes.png is no image')")
        tab.evaluate("addTurn(chat.current, -1, { role: 'user', images: ['x'.repeat(MAX_CONVERSATION_CHARS)] })")
        transfer(tab, "DragEvent", "document.body", "late.png")
        tab.wait(f"{NOTICE}.includes('late.png does not fit: a conversation keeps')")
        tab.evaluate("attached = ['data:,' + 'x'.repeat(MAX_SENT_CHARS)]")
        transfer(tab, "DragEvent", "document.body", "last.png")
        tab.wait(f"{NOTICE}.includes('last.png does not fit: a question takes')")
        tab.evaluate("attached = []; showAttached()")
        assert tab.evaluate("attachOne({ name: 'film.png', size: MAX_FILE_BYTES + 1 })") == (
            "film.png is larger than 64 MiB.")  # fmt: skip
        assert tab.evaluate(ATTACHED) == 0


def test_a_request_holds_the_latest_images(tab: Page) -> None:
    with served(Api(cluster_of("image")).app) as url:
        opened(tab, url)
        seen = tab.evaluate(
            "(() => { const made = newConversation({}), image = 'x'.repeat(2 ** 20);"
            " for (const count of [8, 8, 1, 4]) addTurn(made, made.turns.length - 1, { role: 'user', text: 'q',"
            " images: Array(count).fill(image) });"
            " return messagesOf(made, '', turnsSeen(made)).map(({ content }) => content.length); })()"
        )
        few = tab.evaluate(
            "(() => { const made = newConversation({});"
            " for (let n = 0; n < 6; n += 1) addTurn(made, n - 1, { role: 'user', images: Array(8).fill('x') });"
            " return turnsSeen(made).size; })()"
        )
    assert seen[1:] == [9, 2, 5], "text and images of each turn that is sent as a whole"
    assert seen[0] == len("(8 images, not shown again) q")
    assert few == 4, "32 images"


def test_large_pictures_are_made_smaller(tab: Page) -> None:
    with served(Api(cluster_of("image")).app) as url:
        opened(tab, url)
        url = tab.evaluate(
            "(async () => { const canvas = document.createElement('canvas'); canvas.width = 5000; canvas.height = 100;"
            " canvas.getContext('2d').fillRect(0, 0, 10, 10);"
            " const blob = await new Promise((resolve) => canvas.toBlob(resolve));"
            " return dataUrl(new File([blob], 'wide.png', { type: 'image/png' })); })()"
        )
        assert url.startswith("data:image/jpeg;base64,")
        size = tab.evaluate(
            f"(async () => {{ const made = new Image(); made.src = {json.dumps(url)}; await made.decode();"
            " return [made.width, made.height]; })()"
        )
        assert size == [2048, 41]


def hearing() -> FakeCluster:
    cluster = cluster_of("image", TRANSCRIPTION)
    cluster.media.speech = [SpeechPart(b'{"text": " how are you? "}', "application/json")]
    return cluster


def test_speech_is_transcribed_into_the_message(tab: Page) -> None:
    cluster = hearing()
    with served(Api(cluster).app) as url:
        opened(tab, url)
        tab.type("Hello,")
        press_button(tab, "Dictate")
        tab.wait(f"{LABEL} === 'Stop recording'")
        assert "Recording" in tab.evaluate(TOLD)
        tab.wait(SPOKEN)
        if where := os.environ.get("KEEP_SCREENSHOT"):
            for width in (1280, 768, 390):
                transfer(tab, "DragEvent", "document.body")
                tab.wait(f"{ATTACHED} > 0")
                tab.screenshot(Path(where) / f"media-{width}.png", width, 800)
        for width in (1280, 390, 320):
            tab.resize(width, 844)
            assert not tab.evaluate(WIDER)
        press_button(tab, "Stop recording")
        tab.wait(f"{LABEL} === 'Dictate'")
        assert tab.evaluate("document.getElementById('ask').value") == "Hello, how are you?"
        assert tab.evaluate("document.activeElement.id") == "ask"
        assert tab.evaluate(TOLD) == "Transcribed: how are you?"
        assert tab.complaints == []
    (asked_for,) = cluster.media.heard
    assert asked_for.audio[:4] + asked_for.audio[8:16] == b"RIFFWAVEfmt "
    assert int.from_bytes(asked_for.audio[24:28], "little") == 16_000
    assert len(asked_for.audio) > 44 + 2 * 1600


def test_a_recording_can_be_thrown_away(tab: Page) -> None:
    cluster = hearing()
    with served(Api(cluster).app) as url:
        opened(tab, url)
        press_button(tab, "Dictate")
        tab.wait(f"{LABEL} === 'Stop recording'")
        tab.press("Escape")
        tab.wait(f"{LABEL} === 'Dictate'")
        assert tab.evaluate("document.getElementById('ask').value") == ""
    assert cluster.media.heard == []


@pytest.mark.parametrize("refused", [True, False])
def test_why_nothing_is_transcribed_is_said(tab: Page, refused: bool) -> None:
    cluster = hearing()
    cluster.media.speech = [StepFailed("the engine hears nothing")]
    with served(Api(cluster).app) as url:
        opened(tab, url)
        if refused:
            tab.evaluate(
                "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError'); }"
            )
        press_button(tab, "Dictate")
        if not refused:
            tab.wait(f"{LABEL} === 'Stop recording'")
            tab.wait(SPOKEN)
            press_button(tab, "Stop recording")
        told = "does not allow the microphone" if refused else "Not transcribed: the engine hears nothing"
        tab.wait(f"{NOTICE}.includes({told!r}) && {LABEL} === 'Dictate'")
    tab.complaints.clear()  # the browser logs a 503 as an error


def test_a_model_that_only_transcribes_is_there_for_dictation_alone(tab: Page) -> None:
    heard = [{"id": "talks", "input_modalities": ["text"], "transcription": False},
             {"id": "hears", "input_modalities": ["audio"], "transcription": True}]  # fmt: skip
    with served(Api(cluster_of()).app) as url:
        opened(tab, url)
        tab.evaluate(f"globalThis.fetch = async () => Response.json({{ data: {json.dumps(heard)} }}), findModels()")
        tab.wait("dictation.model === 'hears' && !document.getElementById('dictate').hidden")
        assert tab.evaluate("[...document.getElementById('model').options].map(({ value }) => value)") == ["talks"]


def test_without_a_model_that_hears_there_is_no_button(tab: Page) -> None:
    with served(Api(cluster_of("image")).app) as url:
        opened(tab, url)
        assert tab.evaluate("document.getElementById('dictate').hidden")
