"""FLAC and Ogg in chats reach only nodes that bound their length while they decode: hours of silence take few bytes."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.media import COMPRESSED_AUDIO
from tests.api_parts import error_of
from tests.router.api.test_media_chats import SOUND, api_of, chat
from tests.router.media import pictures as made


def sound(name: str, data: bytes) -> dict[str, Any]:
    encoded = made.data_url(data, "").partition(",")[2]
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": name}}


@pytest.mark.parametrize(("name", "data"), [("flac", made.FLAC), ("ogg", made.OGG)])
async def test_they_need_a_node_that_bounds_them(name: str, data: bytes):
    api = api_of("audio")
    error = error_of(await api.chat(messages=chat(SOUND, sound(name, data))))
    assert error["param"] == "messages[0].content[2].input_audio.data"
    assert "must be WAV or MP3: no node of the model bounds FLAC and Ogg" in error["message"]
    assert api.cluster.media.asked == []
    able = api_of("audio", COMPRESSED_AUDIO)
    assert (await able.chat(messages=chat(SOUND, sound(name, data)))).status_code == 200
    (model,) = (await able.http.get("/v1/models")).json()["data"]
    assert model["input_modalities"] == ["text", "audio"]


async def test_wav_needs_none():
    assert (await api_of("audio").chat(messages=chat(SOUND))).status_code == 200
