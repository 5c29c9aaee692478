"""Media that were made to do harm: each is refused by name and bound, for little of the event loop's time."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.media.image_size import UnreadableImage
from kvferry.router.media.jpeg_scans import MAX_SCANS, SLICE, check_scans, find_marker, marker_in
from kvferry.router.media.limits import MAX_MEDIA, MAX_MEDIA_BYTES
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.parts import media_parts
from kvferry.router.media.refusal import InvalidMedia
from tests.router.media import pictures as made

FIELD = "messages[0].content[0].image_url.url"
CPU_S = 0.05
"""Most seconds of CPU that a refusal may take; three times as much is allowed on a busy machine."""
PNG = made.data_url(made.png(), made.PNG)
WHOLE = (
    (made.png(), made.PNG), (made.jpeg((9, 9)), "image/jpeg"), (made.progressive(3), "image/jpeg"),
    (made.gif((8, 8), (0, 0, 8, 8)), "image/gif"),
    (made.riff(b"WEBP", made.webp_canvas(9, 9), made.webp_lossy(3, 3)), "image/webp"),
)  # fmt: skip


def chat(*urls: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


async def refused(messages: list[dict[str, Any]]) -> tuple[str, float]:
    """The refusal's message, and the seconds of CPU that it took."""
    began = time.thread_time()
    with pytest.raises(InvalidMedia) as caught:
        await MediaLoader().load(media_parts(messages))
    spent = time.thread_time() - began
    assert caught.value.status == 400
    assert caught.value.message.startswith(str(caught.value.param))
    return caught.value.message, spent


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (made.data_url(made.png()[:20], made.PNG), "cut off in its header"),
        (made.data_url(made.png_header(0, 9), made.PNG), "declares no size"),
        (made.data_url(made.png_header(2**31 - 1, 2**31 - 1), made.PNG), "33554432"),
        (made.data_url(made.gif((9, 9), (60_000, 0, 60_000, 9)), "image/gif"), "32768 on a side"),
        (made.data_url(made.riff(b"WEBP", *[made.webp_frame(9, 9)] * 5000), "image/webp"), "4096 parts"),
        (made.data_url(made.progressive(MAX_SCANS + 1), "image/jpeg"), f"more than {MAX_SCANS} scans"),
        (made.data_url(made.progressive(17, side=5792), "image/jpeg"), "more than 16 scans"),
        (
            made.data_url(made.progressive(MAX_SCANS + 1, b"\xff\0" * 2**15), "image/jpeg"),
            f"more than {MAX_SCANS} scans",
        ),
        (made.data_url(made.progressive(1, b"\xff" * 2**22), "image/jpeg"), "4096 parts"),
        (made.data_url(made.png()[:-12] + made.chunk(b"tEXt", b"") * 2**16, made.PNG), "4096 parts"),
        (made.data_url(made.png_header(9, 9) + made.chunk(b"IDAT", b"") * 2**16, made.PNG), "4096 parts"),
        (made.data_url(b"GIF89a" + made.png(), "image/gif"), "no frame"),
        (made.data_url(b"%PDF-1.7\n" + made.png(), made.PNG), "not a supported image format"),
        (made.data_url(b"PK\3\4" + made.png(), made.PNG), "not a supported image format"),
        (made.data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "not a supported image format"),
        (made.data_url(made.png(), "image/gif"), "declared as 'image/gif'"),
        (made.data_url(b"\0" * 2**20, made.PNG), "not a supported image format"),
        (made.data_url(made.png() + b"\0" * MAX_MEDIA_BYTES, made.PNG), f"more than {MAX_MEDIA_BYTES} bytes"),
        (PNG.replace(",", ", "), "not valid base64"),
        (PNG[:40] + "\n" + PNG[40:], "not valid base64"),
        (PNG[:-2] + "%3D%3D", "not valid base64"),
        (PNG.replace("+", "-").replace("iVBO", "_VBO"), "not valid base64"),
        (PNG.replace("iVBO", "\u0456VBO"), "not valid base64"),
        (f"{PNG},{PNG}", "not valid base64"),
        ("data:image/png;base64;base64" + "," * 100, "not valid base64"),
        ("data:" + "a;" * 2**20, "must begin with data:"),
        ("data:text/html;base64," + base64.b64encode(b"<script>").decode() + "====", "not valid base64"),
    ],
)
async def test_hostile_images_are_refused_in_little_time(url: str, why: str):
    message, spent = await refused(chat(url))
    assert message.startswith(FIELD)
    assert why in message
    assert len(message) < 400, "a refusal does not repeat what it refuses"
    assert spent < 3 * CPU_S


async def test_a_thousand_images_are_refused_before_one_is_decoded():
    large = made.data_url(made.png() + b"\0" * 2**20, made.PNG)
    message, spent = await refused(chat(*[large] * 1000))
    assert message.startswith(f"messages[0].content[{MAX_MEDIA}]")
    assert spent < 3 * CPU_S


@pytest.mark.parametrize(
    ("head", "mime", "why"),
    [
        (made.png_header(60_000, 60_000), made.PNG, "60000 x 60000 pixels"),
        (made.png(), "image/webp", "declared as 'image/webp'"),
        (b"PK\3\4" + made.png(), made.PNG, "not a supported image format"),
        (made.progressive(MAX_SCANS + 1), "image/jpeg", f"more than {MAX_SCANS} scans"),
    ],
)
async def test_what_the_first_bytes_show_is_refused_before_the_rest_is_decoded(head: bytes, mime: str, why: str):
    url = made.data_url(head.ljust(2**20, b"\0"), mime)
    message, _ = await refused(chat(url[:-9] + "!" + url[-8:]))
    assert why in message


async def test_scans_count_up_to_the_end_of_the_picture():
    hidden = made.segment(0xFE, b"\xff\xd9\xff\xda")  # a comment that looks like an end, and like a scan
    await check_scans(made.progressive(MAX_SCANS, hidden))
    await check_scans(made.progressive(9) + made.progressive(2 * MAX_SCANS))  # a phone's film behind its picture
    await check_scans(made.progressive(9)[:-1])
    await check_scans(made.progressive(9, b"\xff" * 99))  # fill bytes
    await check_scans(made.progressive(16), 5792**2)
    with pytest.raises(UnreadableImage, match="scans"):
        await check_scans(made.progressive(MAX_SCANS + 1, hidden))
    with pytest.raises(UnreadableImage, match="4096 parts"):
        await check_scans(b"\xff\x01" * 5000)


@pytest.mark.parametrize("place", range(SLICE - 3, SLICE + 2))
async def test_a_marker_may_lie_across_two_slices(place: int):
    with pytest.raises(UnreadableImage, match="scans"):
        await check_scans(made.progressive(MAX_SCANS)[:-2].ljust(place, b"\x12") + b"\xff\xda\0\2")


@pytest.mark.parametrize("pixels", [b"\xff\0", b"\xff\xd3", b"\xff\0\xda", b"\x12\x34"])
async def test_scans_behind_much_data_count(pixels: bytes):
    start = made.progressive(1)[:-2]
    with pytest.raises(UnreadableImage, match="scans"):
        await check_scans(start + pixels * 10**5 + made.progressive(MAX_SCANS)[2:])
    await check_scans(start + pixels * 10**5 + b"\xff\xd9" + made.progressive(MAX_SCANS)[2:])


async def test_long_runs_of_fill_bytes_are_refused():
    with pytest.raises(UnreadableImage, match="4096 parts"):
        await check_scans(made.progressive(9, b"\xff" * 2 * SLICE))


async def test_other_requests_get_turns_while_scans_are_counted():
    turns, task = 0, asyncio.create_task(check_scans(b"\xff\xd8" + b"\xff\0" * 2**21))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 50


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(WHOLE), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=12)), max_size=4),
    st.integers(0, 500), st.sampled_from(("", " ", "\n", "%", "=", "\0", "é", ";", ",")), st.integers(0, 700),
)  # fmt: skip
def test_what_is_not_taken_is_a_refusal_and_nothing_else(
    whole: tuple[bytes, str], changes: list[tuple[int, bytes]], length: int, odd: str, at: int
):
    data = bytearray(whole[0])
    for place, put in changes:
        data[place : place + len(put)] = put
    url = made.data_url(bytes(data[: length or None]), whole[1])
    url = url[:at] + odd + url[at:]

    async def load() -> None:
        began = time.thread_time()
        try:
            (file,) = await MediaLoader().load(media_parts(chat(url)))
            told = file.mime
        except InvalidMedia as error:
            told = error.message
        assert told.startswith(("image/", FIELD))
        assert time.thread_time() - began < 3 * CPU_S

    asyncio.run(load())


@given(st.lists(st.sampled_from([0x00, 0x01, 0x12, 0xCF, 0xD0, 0xD7, 0xD8, 0xDA, 0xFE, 0xFF]), max_size=300), st.data())
def test_markers_are_found_where_the_compiled_search_finds_them(parts: list[int], draw: st.DataObject):
    data = bytes(parts)
    at = draw.draw(st.integers(0, len(data)))
    end = draw.draw(st.integers(at, len(data) + 5))
    assert find_marker(data, at, end) == marker_in(data, at, end)
    quiet = b"\xff\0" * 40 + data
    assert find_marker(quiet, 0, len(quiet)) == marker_in(quiet, 0, len(quiet))
