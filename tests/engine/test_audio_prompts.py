"""Chats with clips that need care: their formats, their bounds, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.engine.media import audio_family, clips
from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.loader import load_media_encoder
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError, InvalidRequest
from tests.engine import tiny_audio as tiny
from tests.engine.speech.test_audio import encoded, tone
from tests.engine.tiny_audio import chat, clip, url_part, wav
from tests.render_requests import render_request

CPU = torch.device("cpu")
CLIP = clip(0.3, 1)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_audio")
    tiny.save("qwen2_audio", path)
    return path


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> MediaEncoder:
    return load(checkpoint)


def load(path: Path) -> MediaEncoder:
    found = load_media_encoder(resolve(str(path)), dtype=torch.float32, device=CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "opus"])
def test_formats_and_rates(encoder: MediaEncoder, name: str) -> None:
    """Files of 48 kHz make about as many tokens as the tower's own rate."""
    prompt = encoder.render(chat((encoded(name, tone(0.5)),)))
    assert prompt.media[0].length == pytest.approx(12, abs=2), "a token for each 0.04 s; lossy formats add padding"


def test_rows_and_hashes_depend_on_the_clip_alone(encoder: MediaEncoder) -> None:
    other = clip(0.5, 5)
    first = encoder.render(chat(("One", CLIP, "and", other)))
    again = encoder.render(chat((other, "another")))
    assert first.media[1].hash == again.media[0].hash != first.media[0].hash
    with torch.inference_mode():
        assert torch.equal(encoder.encode(first.media)[1], encoder.encode(again.media)[0])


def test_placeholders_in_a_text_of_the_client_stay_text(encoder: MediaEncoder) -> None:
    prompt = encoder.render(chat(("What is <|AUDIO|>?", CLIP)))
    (item,) = prompt.media
    text = tiny.tokenizer().decode(prompt.token_ids[: item.offset], skip_special_tokens=False)
    assert text == "user: What is <|AUDIO|>?<|audio_bos|>"
    assert prompt.token_ids[item.offset : item.offset + item.length] == (tiny.IDS["<|AUDIO|>"],) * item.length


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (clip(1.01), r"must not be longer than 1 s"),
        (clip(0.02), r"is too short: it has 0.020 s of audio"),
        (np.zeros(0, np.int16), r"cannot be decoded: it has no samples"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), r"cannot be decoded: it is not WAV, MP3"),
        (wav(clip(0.3))[:40], r"cannot be decoded"),
    ],
)
def test_files_that_are_refused_by_name(encoder: MediaEncoder, wrong: Any, words: str) -> None:
    content = [url_part("text"), url_part(wrong)]
    asked = render_request([{"role": "user", "content": "Hi"}, {"role": "user", "content": content}])
    with pytest.raises(InvalidRequest, match=rf"^messages\[1\]\.content\[1\] {words}") as caught:
        encoder.render(asked)
    assert caught.value.param == "messages[1].content[1]"


def test_audio_of_one_request_is_bounded_before_it_is_heard(
    encoder: MediaEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 clips of ten minutes of silence, 114 kB each, took 19 s before the prompt's length was checked."""
    monkeypatch.setattr(audio_family, "MAX_REQUEST_S", 2.5)
    heard = list[float]()

    def watched(data: bytes, *args: Any) -> torch.Tensor:
        found = clips.clip(data, *args)
        heard.append(len(found) / tiny.RATE)
        return found

    monkeypatch.setattr(audio_family, "clip", watched)
    assert len(encoder.render(chat((clip(1.0), clip(1.0), clip(0.5)))).media) == 3
    heard.clear()
    words = r"must not be longer than 0\.5 s \(the rest of 2\.5 s of audio in one request\)"
    with pytest.raises(InvalidRequest, match=words) as caught:
        encoder.render(chat((clip(1.0), clip(1.0), *[clip(0.6)] * 8)))
    assert caught.value.param == "messages[0].content[2]"
    assert heard == [1.0, 1.0]


def test_other_media(encoder: MediaEncoder) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(InvalidRequest, match=r"shows 0 of 1 images, audios|the model takes no image"):
        encoder.render(render_request([{"role": "user", "content": content}]))


def test_a_tower_of_another_rate(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"sampling_rate": 8000}))
    with pytest.raises(ConfigError, match="takes 8000 samples a second; only 16000"):
        load(tmp_path)
