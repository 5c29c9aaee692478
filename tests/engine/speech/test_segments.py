"""Segments are cut out of a window's tokens as the reference does, and written in every form."""

from __future__ import annotations

import json

import pytest

from kvferry.engine.speech.options import SpeechOptions
from kvferry.engine.speech.segments import Cut, Segment, Word, cut
from kvferry.engine.speech.silence import leading_silence
from kvferry.engine.speech.transcript_text import Transcript, content_type, delta, done, written
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.speech import SpeechRequest
from tests.engine.speech.conftest import noise

ZERO = 1000
"""Id of `<|0.00|>`."""


@pytest.mark.parametrize(
    ("tokens", "cuts", "ahead"),
    [
        ([], [Cut(0.0, 30.0, ())], 3000),
        ([ZERO, 1, 2], [Cut(0.0, 30.0, (ZERO, 1, 2))], 3000),
        ([ZERO, 1, ZERO + 50], [Cut(0.0, 1.0, (ZERO, 1, ZERO + 50))], 3000),
        (
            [ZERO, 1, ZERO + 50, ZERO + 60, 2, ZERO + 90],
            [Cut(0.0, 1.0, (ZERO, 1, ZERO + 50)), Cut(1.2, 1.8, (ZERO + 60, 2, ZERO + 90))],
            3000,
        ),
        ([ZERO, 1, ZERO + 50, ZERO + 50, 2, 3], [Cut(0.0, 1.0, (ZERO, 1, ZERO + 50))], 100),
        ([ZERO, 1, ZERO + 50, ZERO + 50], [Cut(0.0, 1.0, (ZERO, 1, ZERO + 50))], 100),
    ],
)
def test_timestamps_cut(tokens: list[int], cuts: list[Cut], ahead: int) -> None:
    found, at = cut(tokens, ZERO, 3000)
    assert [(c.tokens, pytest.approx(c.start), pytest.approx(c.end)) for c in found] == [
        (c.tokens, c.start, c.end) for c in cuts
    ]
    assert at == ahead


def test_silence_is_found_up_to_the_first_sound() -> None:
    quiet, loud = noise(2.0) * 1e-4, noise(1.0)
    joined = quiet.new_zeros(0)
    assert leading_silence(joined, last=True) == 0
    assert leading_silence(quiet, last=True) == 200
    assert leading_silence(quiet, last=False) == 180
    assert leading_silence(loud, last=True) == 0
    joined = noise(3.0)
    joined[: len(quiet)] = quiet
    assert leading_silence(joined, last=True) == 180, "a fifth of a second before the first sound is heard"
    assert leading_silence(joined[20_000:], last=True) == 0, "pauses of less than a second are heard"


def segment(id: int, start: float, end: float, text: str, *words: Word) -> Segment:
    return Segment(id, 0, start, end, text, (1, 2), 0.0, -0.5, 1.1, 0.01, words)


TRANSCRIPT = Transcript(
    [
        segment(0, 0.0, 1.5, " Grüße, a --> b.", Word("Grüße,", 0.0, 0.7), Word("a", 0.7, 0.9)),
        segment(1, 3661.25, 3662.0, " Second."),
    ],
    "de", 3662.4,
)  # fmt: skip


def options(
    *fields: tuple[str, str], translate: bool = False, languages: tuple[str, ...] = ("en", "de")
) -> SpeechOptions:
    return SpeechOptions.of(SpeechRequest(translate, fields, "a.wav", b""), languages)


def form(name: str, *more: tuple[str, str]) -> bytes:
    return written(TRANSCRIPT, options(("response_format", name), *more))


def test_forms() -> None:
    assert json.loads(form("json")) == {
        "text": "Grüße, a --> b. Second.", "usage": {"type": "duration", "seconds": 3662},
    }  # fmt: skip
    assert form("text").decode() == "Grüße, a --> b. Second.\n"
    assert form("srt").decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nGrüße, a -> b.\n\n2\n01:01:01,250 --> 01:01:02,000\nSecond.\n\n"
    )
    assert form("vtt").decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGrüße, a --&gt; b.\n\n01:01:01.250 --> 01:01:02.000\nSecond.\n\n"
    )


def test_verbose_json_has_what_was_asked_for() -> None:
    plain = json.loads(form("verbose_json"))
    assert (plain["task"], plain["language"], plain["duration"]) == ("transcribe", "german", 3662.4)
    assert plain["segments"][1] == {
        "id": 1, "seek": 0, "start": 3661.25, "end": 3662.0, "text": " Second.", "tokens": [1, 2], "temperature": 0.0,
        "avg_logprob": -0.5, "compression_ratio": 1.1, "no_speech_prob": 0.01,
    }  # fmt: skip
    assert "words" not in plain
    words = json.loads(form("verbose_json", ("timestamp_granularities[]", "word")))
    assert words["words"][0] == {"word": "Grüße,", "start": 0.0, "end": 0.7}
    assert "segments" not in words
    both = json.loads(
        form("verbose_json", ("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"))
    )
    assert len(both["words"]) == len(both["segments"]) == 2


def test_events_of_a_stream() -> None:
    assert content_type(options(("stream", "true"))) == "text/event-stream"
    assert delta("Hi") == b'data: {"type":"transcript.text.delta","delta":"Hi"}\n\n'
    last = json.loads(done(TRANSCRIPT).removeprefix(b"data: "))
    assert (last["type"], last["text"]) == ("transcript.text.done", TRANSCRIPT.text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("language", "xx")], "language"),
        ([("response_format", "docx")], "response_format"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities[]"),
        ([("stream", "true"), ("response_format", "srt")], "stream"),
    ],
)
def test_a_wrong_field_is_named(fields: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        options(*fields)
    assert error.value.param == param


def test_languages_have_codes_and_names() -> None:
    assert options(("language", "DE")).language == options(("language", "German")).language == "de"
    assert options().language == ""
    assert options(languages=()).language == "en"
    with pytest.raises(InvalidRequest, match="does not translate"):
        options(translate=True, languages=())


def test_a_temperature_that_is_given_is_the_only_one() -> None:
    assert options(("temperature", "0.4")).temperatures == (0.4,)
    assert len(options(("temperature", "0")).temperatures) == 6
