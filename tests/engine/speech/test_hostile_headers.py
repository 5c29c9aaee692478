"""Files of a few kilobytes whose headers FFmpeg would expand to gigabytes are refused, or read without those."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from kvferry.engine.media.clips import clip
from kvferry.engine.speech.audio import AudioFile
from kvferry.engine.speech.containers import MAX_SAMPLES, mp4_fault
from kvferry.protocol.errors import InvalidRequest
from tests.engine.speech.hostile_files import (
    bomb_tag,
    box,
    mp4_of_fragments,
    mp4_of_samples,
    tagged_mp3,
    tagged_wav,
)
from tests.engine.speech.test_audio import encoded, tone

MOST_MIB = 48


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    "data",
    [
        mp4_of_samples(170_000_000),
        mp4_of_samples(170_000_000, big=True),
        mp4_of_samples(100_000, edits=1000),
        mp4_of_fragments(80_000_000),
        mp4_of_samples(10) + box(b"free", box(b"moov", box(b"cmov", bytes(8)))),
        mp4_of_samples(10) + b"\0\0\0\7" + mp4_of_samples(MAX_SAMPLES),
    ],
    ids=["table", "table in a big box", "edits", "fragment", "compressed header", "behind a wrong size"],
)
def test_mp4_files_of_endless_tables_are_refused(data: bytes) -> None:
    before = peak_mib()
    with pytest.raises(InvalidRequest, match=r"tables have \d+ entries|header is compressed"):
        AudioFile(data, 14_400)
    assert peak_mib() - before < MOST_MIB


def test_usual_mp4_files_are_taken() -> None:
    data = encoded("mp4", tone(2.0))
    assert mp4_fault(data) == ""
    assert mp4_fault(mp4_of_samples(1000, edits=2)) == ""
    assert mp4_fault(box(b"ftyp", b"isom") + box(b"mdat", b"trun" * 100)) == "", "media data may hold any bytes"
    assert len(AudioFile(data, 60).read(40_000)) >= 32_000


@pytest.mark.parametrize("build", [tagged_mp3, tagged_wav])
def test_compressed_tags_are_not_inflated(build: Callable[[bytes], bytes]) -> None:
    before = peak_mib()
    data = build(bomb_tag(40))
    assert len(AudioFile(data, 60).read(40_000)) >= 16_000
    assert peak_mib() - before < MOST_MIB


def test_several_tags_and_footers_are_skipped() -> None:
    tag = bomb_tag(1, 1000)
    footed = tag[:5] + b"\x10" + tag[6:] + b"3DI" + tag[3:10]
    plain = AudioFile(tagged_mp3(b""), 60).read(40_000)
    assert len(AudioFile(tagged_mp3(tag + footed + tag), 60).read(40_000)) == len(plain)
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        AudioFile(tag[:12], 60)


@pytest.mark.parametrize("name", ["flac", "opus"])
def test_hours_of_silence_in_a_clip_are_refused_early(name: str) -> None:
    """A chat's clip is decoded as far as its bound, whatever its size and header tell."""
    data = encoded(name, tone(40.0)[::3] * 0, rate=16_000)
    blind = data.replace(data[18:26], data[18:21] + b"\xf0" + bytes(4), 1) if name == "flac" else data
    before = peak_mib()
    for each in (data, blind):
        with pytest.raises(InvalidRequest, match=r"must not be longer than 5 s \(this model's limit\)"):
            clip(each, "messages[0]", 5.0)
    assert peak_mib() - before < MOST_MIB


@pytest.mark.parametrize("magic", [b"fLaC", b"OggS"])
def test_damaged_clips_are_refused_by_name(magic: bytes) -> None:
    for tail in (b"", bytes(400), b"\xff" * 4000, bytes(range(256)) * 16):
        with pytest.raises(InvalidRequest, match=r"^messages\[0\] (cannot be decoded|must have)"):
            clip(magic + tail, "messages[0]", 5.0)
