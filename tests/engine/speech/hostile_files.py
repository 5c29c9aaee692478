"""Small audio files that make FFmpeg allocate far more than their size."""

from __future__ import annotations

import struct
import zlib

RATE = 16_000


def box(name: bytes, *parts: bytes) -> bytes:
    """Return an MP4 box."""
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), name) + body


def full(name: bytes, *fields: int, flags: int = 0, more: bytes = b"") -> bytes:
    """Return a box with a version, flags and 32-bit fields."""
    return box(name, struct.pack(f">{1 + len(fields)}I", flags, *fields), more)


def mp4_of_samples(count: int, edits: int = 0, *, big: bool = False) -> bytes:
    """Return an MP4 file whose track tells of so many samples of a byte. big: with 64-bit sizes of top-level boxes."""
    return _mp4(
        full(b"stts", 1, count, 2), full(b"stsc", 1, 1, count, 1), full(b"stsz", 1, count), full(b"stco", 1, 8),
        edits=edits, big=big,
    )  # fmt: skip


def mp4_of_fragments(count: int) -> bytes:
    """Return an MP4 file with a fragment of so many samples that need no bytes."""
    tables = (full(b"stts", 0), full(b"stsc", 0), full(b"stsz", 0, 0), full(b"stco", 0))
    extends = box(b"mvex", full(b"trex", 1, 1, 1, 2, 0))
    run = box(b"traf", full(b"tfhd", 1, flags=0x20000), full(b"trun", count))
    return _mp4(*tables, extends=extends) + box(b"moof", full(b"mfhd", 1), run) + box(b"mdat", bytes(1000))


def _mp4(*tables: bytes, extends: bytes = b"", edits: int = 0, big: bool = False) -> bytes:
    entry = box(b"sowt", struct.pack(">6xH8xHHHHI", 1, 1, 16, 0, 0, RATE << 16))
    described = box(b"stbl", full(b"stsd", 1, more=entry), *tables)
    data = box(b"dinf", full(b"dref", 1, more=full(b"url ", flags=1)))
    handler = full(b"hdlr", 0, int.from_bytes(b"soun", "big"), 0, 0, 0)
    media = box(b"mdia", full(b"mdhd", 0, 0, RATE, RATE, 0), handler, box(b"minf", full(b"smhd", 0), data, described))
    cuts = box(b"edts", full(b"elst", edits, more=struct.pack(">IIHH", 1000, 0, 1, 0) * edits)) if edits else b""
    track = box(b"trak", full(b"tkhd", 0, 0, 1, 0, 1000, *[0] * 15, flags=7), cuts, media)
    moov = box(b"moov", full(b"mvhd", 0, 0, 1000, 1000, *[0] * 20), track, extends)
    if big:
        moov = struct.pack(">I4sQ", 1, b"moov", len(moov) + 8) + moov[8:]
    return box(b"ftyp", b"isom\0\0\0\0isom") + moov + box(b"mdat", bytes(1000))


def bomb_tag(frames: int, each: int = 2**22) -> bytes:
    """Return an ID3 tag of compressed frames, each of which inflates to so many bytes of zeros."""
    raw = b"\0text/plain\0\0\0" + bytes(each)
    frame = _seven_bits(len(raw)) + zlib.compress(raw, 9)
    body = (b"GEOB" + _seven_bits(len(frame)) + b"\0\x09" + frame) * frames
    return b"ID3\x04\0\0" + _seven_bits(len(body)) + body


def tagged_mp3(tag: bytes) -> bytes:
    """Return a second of silence as MP3, behind a tag."""
    return tag + (bytes((0xFF, 0xFB, 0x90, 0x64)) + bytes(413)) * 40


def tagged_wav(tag: bytes) -> bytes:
    """Return a second of silence as WAV with a tag's chunk."""
    chunks = (
        (b"fmt ", struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)),
        (b"ID3 ", tag),
        (b"data", bytes(2 * RATE)),
    )
    body = b"".join(struct.pack("<4sI", name, len(data)) + data + bytes(len(data) % 2) for name, data in chunks)
    return struct.pack("<4sI4s", b"RIFF", 4 + len(body), b"WAVE") + body


def _seven_bits(number: int) -> bytes:
    return bytes(number >> shift & 0x7F for shift in (21, 14, 7, 0))
