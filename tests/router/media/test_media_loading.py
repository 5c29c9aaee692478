"""Media of a request: what is taken is read with its usual MIME type; all else is refused with its field and bound."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import has_part
from kvferry.router.long_work import SOURCE
from kvferry.router.media import loading
from kvferry.router.media.limits import MAX_MEDIA, MAX_MEDIA_BYTES
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.parts import MODALITIES, media_parts
from tests.router.media import pictures as made

FIELD = "messages[0].content[1].image_url.url"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def audio(data: bytes, name: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": name}}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


async def load(*parts: Any) -> list[tuple[str, str]]:
    found = await MediaLoader().load(media_parts(chat(*parts)))
    return [(each.part.modality, made.data_url(each.data, each.mime)) for each in found]


async def refusal(*parts: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await load(*parts)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)
    return caught.value


@pytest.mark.parametrize(
    ("part", "modality", "url"),
    [
        (image(made.data_url(made.png(), "image/png")), "image", made.data_url(made.png(), "image/png")),
        (image(made.data_url(made.jpeg((9, 9)), "image/JPG")), "image", made.data_url(made.jpeg((9, 9)), "image/jpeg")),
        (image(made.data_url(made.png(), "image/png;x=1")), "image", made.data_url(made.png(), "image/png")),
        (image("DATA:" + made.data_url(made.png(), "image/png")[5:]), "image", made.data_url(made.png(), "image/png")),
        (audio(made.wav()), "audio", made.data_url(made.wav(), "audio/wav")),
        (audio(made.MP3, "mp3"), "audio", made.data_url(made.MP3, "audio/mpeg")),
        (audio(made.FLAC, "flac"), "audio", made.data_url(made.FLAC, "audio/flac")),
        (audio(made.OGG, "ogg"), "audio", made.data_url(made.OGG, "audio/ogg")),
        ({"type": "audio_url", "audio_url": {"url": made.data_url(made.OGG, "application/ogg")}}, "audio",
         made.data_url(made.OGG, "audio/ogg")),
        ({"type": "audio_url", "audio_url": {"url": made.data_url(made.wav(), "audio/x-wav")}}, "audio",
         made.data_url(made.wav(), "audio/wav")),
        ({"type": "video_url", "video_url": {"url": made.data_url(made.MP4, "video/mp4")}}, "video",
         made.data_url(made.MP4, "video/mp4")),
    ],
)  # fmt: skip
async def test_each_kind_has_its_usual_mime_type(part: dict[str, Any], modality: str, url: str):
    assert await load(part) == [(modality, url)]


def test_text_alone_has_no_media():
    assert not has_part([{"role": "user", "content": "hello"}, *chat({"type": ["odd"]}, "odd")], MODALITIES)
    assert has_part(chat(image("x")), MODALITIES)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (made.data_url(made.png_header(60_000, 60_000), made.PNG), "60000 x 60000 pixels"),
        (made.data_url(made.png_header(2**15 + 1, 1), made.PNG), "32768 on a side"),
        (made.data_url(made.png(), made.PNG)[:-1], "not valid base64"),
        (made.data_url(made.png(), made.PNG)[:-4], None),
        (made.data_url(made.png(), made.PNG)[:-3] + "!==", "not valid base64"),
        (made.data_url(made.png(), made.PNG).replace("base64,iVBO", "base64,iVB="), "not valid base64"),
        ("data:image/png;base64,", "not valid base64"),
        ("data:image/png,abcd", "must begin with data:"),
        ("data:base64,abcd", "must begin with data:"),
        (f"data:{'x' * 200};base64,abcd", "must begin with data:"),
        (made.data_url(made.png(), "image/jpeg"), "'image/jpeg', and its first bytes are those of image/png"),
        (made.data_url(b"<svg></svg>", "image/svg+xml"), "not a supported image format"),
        (made.data_url(made.wav(), "image/png"), "not a supported image format"),
        (made.data_url(b"\x89PNG\r\n\x1a\nabc", made.PNG), "declares no size"),
        ("http://127.0.0.1/a.png", "this server fetches nothing"),
        ("file:///etc/passwd", "this server fetches nothing"),
        ("", "must be a string"),
        (None, "must be a string"),
    ],
)
async def test_what_is_not_an_image_is_refused_by_name(url: Any, why: str | None):
    if why is None:  # whole base64 of a cut image: its header is there, the rest is the engine's to judge
        assert await load(image(url))
        return
    error = await refusal(image(url))
    assert error.param == FIELD
    assert why in error.message


@pytest.mark.parametrize(
    ("part", "param", "why"),
    [
        ({"type": "image_url"}, "messages[0].content[1].image_url", "must be an object"),
        ({"type": "image_url", "image_url": ["data:"]}, "messages[0].content[1].image_url", "must be an object"),
        ({"type": "image_url", "image_url": ""}, "messages[0].content[1].image_url", "must be a string that"),
        ({"type": "input_audio", "input_audio": "UklG"}, "messages[0].content[1].input_audio", "must be an object"),
        (audio(made.wav(), "aiff"), "messages[0].content[1].input_audio.format", "mp3, flac, ogg, got 'aiff'"),
        (audio(made.wav(), "flac"), "messages[0].content[1].input_audio.data", "first bytes are those of audio/wav"),
        (audio(made.OGG, "flac"), "messages[0].content[1].input_audio.data", "first bytes are those of audio/ogg"),
        (audio(made.wav(), "mp3"), "messages[0].content[1].input_audio.data", "first bytes are those of audio/wav"),
        (audio(b""), "messages[0].content[1].input_audio.data", "must be a string"),
        (audio(made.wav(rate=1)), "messages[0].content[1].input_audio.data", "4000 to 384000 Hz"),
        (audio(made.wav(codec=2)), "messages[0].content[1].input_audio.data", "compressed"),
        (audio(made.riff(b"WAVE")), "messages[0].content[1].input_audio.data", "no format chunk"),
        ({"type": "video_url", "video_url": {"url": made.data_url(made.png(), made.PNG)}},
         "messages[0].content[1].video_url.url", "not a supported video format"),
    ],
)  # fmt: skip
async def test_other_parts_are_refused_by_name(part: dict[str, Any], param: str, why: str):
    error = await refusal(part)
    assert error.param == param
    assert why in error.message


@pytest.mark.parametrize("mime", ["", "image/*", "application/octet-stream"])
async def test_an_unknown_type_is_that_of_the_first_bytes(mime: str):
    assert await load(image(made.data_url(made.png(), mime))) == [("image", made.data_url(made.png(), made.PNG))]


async def test_a_url_may_stand_where_its_object_would():
    url = made.data_url(made.png(), made.PNG)
    assert await load({"type": "image_url", "image_url": url}) == [("image", url)]
    error = await refusal({"type": "image_url", "image_url": "data:image/png;base64,!!!!"})
    assert error.param == "messages[0].content[1].image_url"


async def test_a_thousand_parts_are_refused_before_any_is_read():
    error = await refusal(*[image("data:image/png;base64,AAAA")] * 1000)
    assert error.param == f"messages[0].content[{MAX_MEDIA + 1}]"
    assert f"beyond the {MAX_MEDIA} images" in error.message
    assert len(await load(*[image(made.data_url(made.png(), made.PNG))] * MAX_MEDIA)) == MAX_MEDIA


async def test_the_sums_of_a_request_are_bounded():
    large = made.data_url(made.png_header(2**15, 2**10), made.PNG)
    assert len(await load(*[image(large)] * 4)) == 4
    assert "above 134217728 pixels" in (await refusal(*[image(large)] * 5)).message
    part = image(made.data_url(made.png() + b"\0" * (MAX_MEDIA_BYTES - 200), made.PNG))
    assert "above 33554432 bytes" in (await refusal(*[part] * 3)).message
    longer = made.data_url(made.png() + b"\0" * MAX_MEDIA_BYTES, made.PNG)
    assert f"more than {MAX_MEDIA_BYTES} bytes" in (await refusal(image(longer))).message


async def test_other_requests_get_turns_while_a_long_part_is_decoded():
    part = image(made.data_url(made.png() + b"\0" * 2**22, made.PNG))
    turns, task = 0, asyncio.create_task(load(part))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await task) == 1
    assert turns > 10


class Web:
    """A fetcher of pages in memory."""

    def __init__(self, **pages: tuple[bytes, str]) -> None:
        self.pages, self.asked = pages, list[str]()

    def check(self, url: str, field: str) -> None:
        if url not in self.pages:
            raise InvalidRequest(f"{field} is not allowed", param=field)

    async def fetch(self, url: str, field: str, tenant: str = "") -> tuple[bytes, str]:
        self.asked.append(f"{tenant} {url}")
        await asyncio.sleep(0)
        return self.pages[url]

    async def close(self) -> None: ...


async def test_fetched_media_are_checked_like_others_and_keep_their_places():
    web = Web(a=(made.png(), "image/png; charset=x"), b=(made.jpeg((3, 3)), ""), c=(made.png(), "text/html"))
    here = made.data_url(made.png(2, 2), made.PNG)
    found = await MediaLoader(web).load(media_parts(chat(image("a"), image(here), image("b"))), "me")
    files = [(made.png(), made.PNG), (made.png(2, 2), made.PNG), (made.jpeg((3, 3)), "image/jpeg")]
    assert [(each.data, each.mime) for each in found] == files
    assert [each.part.place for each in found] == [1, 2, 3]
    assert sorted(web.asked) == ["me a", "me b"]
    with pytest.raises(InvalidRequest, match="'text/html'"):
        await MediaLoader(web).load(media_parts(chat(image("c"))))


async def test_nothing_is_fetched_for_a_request_that_is_refused_anyway():
    web = Web(a=(made.png(), made.PNG))
    for other in ("elsewhere", made.data_url(made.png_header(60_000, 60_000), made.PNG)):
        with pytest.raises(InvalidRequest):
            await MediaLoader(web).load(media_parts(chat(image("a"), image(other))))
    assert web.asked == []


async def test_hosts_of_the_setting_may_be_asked():
    loader = loading.MediaLoader.of(" one.example , two.example")
    with pytest.raises(InvalidRequest, match=r"'three\.example', which is not in --allowed-media-domains"):
        await loader.load(media_parts(chat(image("https://three.example/a.png"))))
    await loader.close()


async def test_long_media_of_one_source_do_not_delay_those_of_another():
    loader, ends = MediaLoader(), list[str]()
    parts = media_parts(chat(image(made.data_url(made.png().ljust(loading.LONG_CHARS, b"\0"), made.PNG))))

    async def loaded(source: str) -> None:
        SOURCE.set(source)
        await loader.load(parts)
        ends.append(source)

    await asyncio.gather(*map(loaded, [*"a" * 10, "b"]))
    assert "b" in ends[:4]
