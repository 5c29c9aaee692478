"""Measures the cost of refusing hostile media: images and sounds in chats, and files to transcribe.

    python -m benchmarks.media_refusals [--repeats 5]

Prints a table: the refusal, and the milliseconds of CPU until the refusal, in the fastest of some runs. Chats are read
and checked as in a router, and their media decoded as in a worker; for files the router's form reader and the worker's
decoder run."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from io import BytesIO

from PIL import Image

from benchmarks.media_attacks import LONG, chunk, data_url, png
from kvferry.engine.media.clips import clip
from kvferry.engine.media.pictures import picture
from kvferry.engine.speech.audio import AudioFile
from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.audio.form import read_form
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.parse_pacing import measured_s
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.media.loading import MediaLoader
from kvferry.router.media.parts import media_parts

GOAL_MS = 50.0
"""CPU time that a refusal should take at most, in milliseconds."""
LONGEST_S = 4 * 3600.0
"""Maximum length of a file to transcribe, in seconds: a worker's default."""
CLIP_S = 30.0
"""Length of a sound that a model of chats hears, in seconds."""
Case = tuple[str, Callable[[], Awaitable[object]]]


def wav(samples: int, declared: int | None = None, *, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    """Return a WAV file of silence; declared: bytes of samples that its header states, by default the true number."""
    data = bytes(samples * channels * bits // 8)
    size = len(data) if declared is None else declared
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    head = b"RIFF" + struct.pack("<I", min(size + 36, 2**32 - 1)) + b"WAVEfmt \x10\0\0\0" + form
    return head + b"data" + struct.pack("<I", size) + data


def flac(samples: int) -> bytes:
    """Return the header of a FLAC file that declares this number of samples at 16 kHz."""
    packed = (16_000 << 44) | (0 << 41) | (15 << 36) | samples
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80\0\0\x22" + info + b"\xff\xf8" + bytes(64)


def chat(*parts: dict[str, object]) -> Callable[[], Awaitable[object]]:
    """Return the reading and checking of a chat with these content parts."""
    body = json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()

    async def read() -> None:
        await measured_s(body)
        found = await parsed(ChatBody, body)
        for file in await MediaLoader().load(media_parts(found.messages)):
            field = file.part.field
            picture(file.data, field) if file.part.modality == "image" else clip(file.data, field, CLIP_S)

    return read


def image(data: bytes | str, mime: str = "image/png") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data, mime)}}


def exif(entries: int) -> bytes:
    """Return an EXIF header of entries that each claim 64 KiB."""
    told = b"".join(struct.pack(">HHII", tag, 7, 2**16, 8) for tag in range(1, entries + 1))
    return b"MM\0*\0\0\0\x08" + struct.pack(">H", entries) + told


def frames(form: str, count: int, copies: int = 1) -> bytes:
    """Return an animation; copies: how often a WebP's frames stand in the file."""
    file, colours = BytesIO(), [Image.new("L", (16, 16), number * 97 % 256) for number in range(count)]
    colours[0].save(file, form, save_all=True, append_images=colours[1:])
    data = file.getvalue()
    if copies > 1:
        data += data[data.find(b"ANMF") :] * (copies - 1)
        data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
    return data


def sound(data: bytes, name: str = "wav") -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": name}}


def file(data: bytes, parts: int = 0) -> Callable[[], Awaitable[object]]:
    """Return the reading of a form and the decoding of its file up to the refusal."""
    field = b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na\r\n'
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = field * parts + head + data + b"\r\n--x--\r\n"

    async def read() -> None:
        made = (await read_form(body)).file
        assert made is not None
        opened = AudioFile(made, LONGEST_S)
        while len(opened.read(30 * 16_000)):
            pass

    return read


def cases() -> Iterator[Case]:
    """Yield all requests by name."""
    scan = b"\xff\xda\x00\x08" + bytes(6) + b"\xff\0"
    jpeg = b"\xff\xd8\xff\xc2" + struct.pack(">HBHHB", 8, 8, 9, 9, 0) + scan
    long = data_url(png(8, 8, LONG))
    text = b"key\0\0" + zlib.compress(bytes(2**20 - 1))
    yield "image: cut off", chat(image(png(8, 8)[:20]))
    yield "image: no pixels", chat(image(png(0, 9)))
    yield "image: 2^62 pixels", chat(image(png(2**31 - 1, 2**31 - 1)))
    yield "image: 3.6 gigapixels, 11 MiB", chat(image(png(60_000, 60_000, LONG)))
    yield "image: PDF and PNG at once", chat(image(b"%PDF-1.7\n" + png(8, 8)))
    yield "image: GIF and PNG at once", chat(image(b"GIF89a" + png(8, 8), "image/gif"))
    yield "image: wrong MIME type, 11 MiB", chat(image(png(8, 8, LONG), "image/webp"))
    yield "image: 900,000 scans, 11 MiB", chat(image(jpeg + scan * (LONG // len(scan)), "image/jpeg"))
    yield "image: 200 scans behind 11 MiB", chat(image(jpeg + b"\xff\0" * (LONG // 2) + scan * 200, "image/jpeg"))
    yield "image: 11 MiB of fill bytes", chat(image(jpeg + b"\xff" * LONG, "image/jpeg"))
    yield "image: 900,000 chunks behind the pixels", chat(image(png(8, 8, behind=chunk(b"tEXt", b"") * (LONG // 12))))
    yield "image: 900,000 chunks of pixels", chat(image(png(8, 8, behind=chunk(b"IDAT", b"") * (LONG // 12))))
    yield "image: a private chunk of 11 MiB", chat(image(png(8, 8, behind=chunk(b"prIv", bytes(LONG)))))
    yield "image: 4 GB of text in 4 MB", chat(image(png(8, 8, behind=chunk(b"zTXt", text) * 4000)))
    yield "image: EXIF of 60,000 entries", chat(image(png(8, 8, behind=chunk(b"eXIf", exif(60_000)))))
    yield "image: GIF of 10,000 frames", chat(image(frames("GIF", 10_000), "image/gif"))
    yield "image: WebP of 500 frames", chat(image(frames("WEBP", 500), "image/webp"))
    yield "image: WebP of 10,000 frames", chat(image(frames("WEBP", 500, copies=20), "image/webp"))
    yield "image: 11 MiB of base64, wrong at its end", chat(image(long[:-4] + "!==="))
    yield "image: 1,000 parts", chat(*[image(png(8, 8))] * 1000)
    yield "image: 1,000 parts, 12 MiB", chat(*[image(png(8, 8, 9000))] * 1000)
    yield "sound: cut off", chat(sound(wav(99)[:30]))
    yield "sound: no samples", chat(sound(wav(0)))
    yield "sound: 2^32 bytes declared", chat(sound(wav(99, 2**32 - 1)))
    yield "sound: no rate", chat(sound(wav(99, rate=0)))
    yield "sound: 65,535 channels", chat(sound(wav(9, channels=65_535, bits=8)))
    yield "sound: ZIP and WAV at once, 11 MiB", chat(sound(b"PK\3\4" + wav(LONG // 2)))
    yield "sound: wrong format, 11 MiB", chat(sound(wav(LONG // 2), "mp3"))
    yield "file: cut off", file(wav(99)[:30])
    yield "file: no samples", file(wav(0))
    yield "file: 10^9 samples declared", file(flac(10**9))
    yield "file: 2^36 samples declared", file(flac(2**36 - 1))
    yield "file: 5 hours in 9 MB", file(wav(5 * 3600 * 4000 // 8, rate=500))
    yield "file: 65,535 channels", file(wav(9, channels=65_535, bits=8))
    yield "file: PDF and WAV at once, 11 MiB", file(b"%PDF-1.7\n" + wav(LONG // 2))
    yield "file: an Ogg page of zeros, 11 MiB", file(b"OggS" + bytes(LONG))
    yield "file: 1,000 fields", file(wav(99), parts=1000)


async def refusal(read: Callable[[], Awaitable[object]], repeats: int) -> tuple[str, float]:
    """Return the refusal, and the CPU milliseconds of the fastest run; all threads of the process count."""
    answer, found = "taken", list[float]()
    for _ in range(repeats):
        began = time.process_time()
        try:
            await read()
        except InvalidRequest as error:
            answer = error.message
        found.append(1e3 * (time.process_time() - began))
    return answer, min(found)


async def report(repeats: int) -> None:
    print(f"| request | CPU | within {GOAL_MS:.0f} ms | answer |\n| --- | --- | --- | --- |")
    for name, read in cases():
        answer, spent_ms = await refusal(read, repeats)
        print(f"| {name} | {spent_ms:.1f} ms | {'yes' if spent_ms <= GOAL_MS else 'no'} | {answer[:120]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(report(parser.parse_args().repeats))


if __name__ == "__main__":
    main()
