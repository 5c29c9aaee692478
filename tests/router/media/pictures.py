"""Small images, audio and video in the formats that a router takes, and damaged ones."""

from __future__ import annotations

import base64
import struct
import zlib


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_header(width: int, height: int) -> bytes:
    """What a decoder believes: signature and header alone, a few bytes for any number of pixels."""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def png(width: int = 8, height: int = 8, colour: int = 0) -> bytes:
    """A whole image of one colour."""
    row = b"\0" + bytes([colour]) * 3 * width
    return png_header(width, height) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def jpeg(*sizes: tuple[int, int], before: bytes = b"") -> bytes:
    """Headers up to the first scan, with a frame header for each size."""
    frames = b"".join(segment(0xC0, struct.pack(">BHHB", 8, high, wide, 0)) for wide, high in sizes)
    return b"\xff\xd8" + before + segment(0xE0, b"JFIF\0") + frames + segment(0xDA, b"\0") + b"\0" * 8


def progressive(scans: int, between: bytes = b"", side: int = 1) -> bytes:
    """A JPEG with so many scans, in each of them a stuffed byte and a restart."""
    scan = segment(0xDA, b"\0" * 6) + b"\xff\0\xff\xd0\0" + between
    return b"\xff\xd8" + segment(0xC2, struct.pack(">BHHB", 8, side, side, 0)) + scan * scans + b"\xff\xd9"


def gif(screen: tuple[int, int], frame: tuple[int, int, int, int]) -> bytes:
    """frame: left, top, width, height."""
    comment = b"\x21\xfe\x03abc\x02de\x00"
    return b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"\0" * 6 + comment + b"\x2c" + struct.pack(
        "<4HB", *frame, 0) + b"\x02\x00;"  # fmt: skip


def riff(kind: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + kind + body


def int24(value: int) -> bytes:
    return value.to_bytes(3, "little")


def webp_lossy(width: int, height: int) -> tuple[bytes, bytes]:
    return b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)


def webp_lossless(width: int, height: int) -> tuple[bytes, bytes]:
    return b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)


def webp_canvas(width: int, height: int) -> tuple[bytes, bytes]:
    return b"VP8X", b"\0\0\0\0" + int24(width - 1) + int24(height - 1)


def webp_frame(width: int, height: int) -> tuple[bytes, bytes]:
    return b"ANMF", b"\0" * 6 + int24(width - 1) + int24(height - 1) + b"\0" * 4


def wav(seconds: float = 0.1, rate: int = 8000, codec: int = 1, channels: int = 1) -> bytes:
    samples = b"\0\0" * int(seconds * rate) * channels
    form = struct.pack("<HHIIHH", codec, channels, rate, rate * 2 * channels, 2 * channels, 16)
    return riff(b"WAVE", (b"LIST", b"odd"), (b"fmt ", form), (b"data", samples))


FLAC, OGG = b"fLaC\x00\x00\x00\x22" + b"\0" * 400, b"OggS" + b"\0" * 400
MP3 = b"\xff\xfb\x90\x00" + b"\0" * 400
MP4 = struct.pack(">I", 16) + b"ftypisom" + b"\0" * 64


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


PNG = "image/png"
