"""Sizes of images from their headers: every declaration counts, and nothing that a client sends takes long."""

from __future__ import annotations

import random
import time

import pytest

from kvferry.router.media.image_size import UnreadableImage, image_size
from tests.router.media import pictures as made


@pytest.mark.parametrize(
    ("data", "mime", "size"),
    [
        (made.png(7, 9), "image/png", (7, 9)),
        (made.png_header(60_000, 60_000), "image/png", (60_000, 60_000)),
        (made.png_header(4, 4) + made.png(50_000, 3)[8:], "image/png", (50_000, 4)),
        (made.jpeg((640, 480)), "image/jpeg", (640, 480)),
        (made.jpeg((640, 480), before=b"\xff\xff\xff\x01"), "image/jpeg", (640, 480)),
        (made.jpeg((8, 8), (60_000, 60_000)), "image/jpeg", (60_000, 60_000)),
        (made.gif((20, 10), (0, 0, 20, 10)), "image/gif", (20, 10)),
        (made.gif((20, 10), (5, 0, 60_000, 9)), "image/gif", (60_005, 10)),
        (made.riff(b"WEBP", made.webp_lossy(300, 200)), "image/webp", (300, 200)),
        (made.riff(b"WEBP", made.webp_lossless(16_384, 1)), "image/webp", (16_384, 1)),
        (made.riff(b"WEBP", made.webp_canvas(9, 2**24), (b"ICCP", b"odd"), made.webp_lossy(3, 3)), "image/webp",
         (9, 2**24)),
        (made.riff(b"WEBP", made.webp_canvas(9, 9), made.webp_frame(8, 500)), "image/webp", (9, 500)),
    ],
)  # fmt: skip
def test_the_largest_declared_size_counts(data: bytes, mime: str, size: tuple[int, int]):
    assert image_size(data, mime) == size


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (made.png()[:8], "image/png"),
        (made.png()[:20], "image/png"),
        (made.png_header(0, 5), "image/png"),
        (made.jpeg(), "image/jpeg"),
        (made.jpeg((8, 8))[:8], "image/jpeg"),
        (b"\xff\xd8\xff\xe0\x00\x04ab" + b"no marker", "image/jpeg"),
        (made.gif((2, 2), (0, 0, 2, 2))[:20], "image/gif"),
        (b"GIF89a" + b"\0" * 40, "image/gif"),
        (made.riff(b"WEBP"), "image/webp"),
        (made.riff(b"WEBP", (b"VP8X", b"\0\0")), "image/webp"),
    ],
)
def test_an_image_without_a_size_is_refused(data: bytes, mime: str):
    with pytest.raises(UnreadableImage):
        image_size(data, mime)


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 2**22, "image/png"),
        (b"\xff\xd8" + b"\xff" * 2**22, "image/jpeg"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 2**20, "image/jpeg"),
        (b"GIF89a\1\0\1\0\0\0\0\x21\xfe" + b"\1a" * 2**21, "image/gif"),
        (b"RIFF\0\0\0\0WEBP" + b"JUNK\0\0\0\0" * 2**19, "image/webp"),
    ],
)
def test_endless_headers_are_read_for_milliseconds(data: bytes, mime: str):
    began = time.process_time()
    with pytest.raises(UnreadableImage, match="4096 parts"):
        image_size(data, mime)
    assert time.process_time() - began < 0.1


def test_damaged_images_raise_nothing_else():
    rng, refused = random.Random(4), 0
    whole = [(made.png(), "image/png"), (made.jpeg((8, 8)), "image/jpeg"),
             (made.gif((8, 8), (0, 0, 8, 8)), "image/gif"),
             (made.riff(b"WEBP", made.webp_canvas(9, 9), made.webp_lossy(3, 3)), "image/webp")]  # fmt: skip
    for data, mime in whole * 300:
        damaged = bytearray(data[: rng.randrange(8, len(data))])
        damaged[rng.randrange(6, len(damaged))] = rng.randrange(256)
        try:
            image_size(bytes(damaged), mime)
        except UnreadableImage:
            refused += 1
    assert 100 < refused < 1200
