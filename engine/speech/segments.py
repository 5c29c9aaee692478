"""Segments and words of a transcript, and `cut`, which cuts a window's tokens into segments by their timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP_S = 0.02
"""Seconds from one timestamp to the next."""
FRAMES_PER_STEP = 2
"""Frames of a spectrogram from one timestamp to the next."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its begin and end, in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a transcript, mostly a sentence. Fields are those of the OpenAI API's verbose_json.

    seek: frame of 0.01 s at which its window begins. start, end: in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens of a segment with its bounds in seconds after the window's begin."""

    start: float
    end: float
    tokens: tuple[int, ...]


def cut(tokens: Sequence[int], first_time: int, frames: int) -> tuple[list[Cut], int]:
    """Return the segments of a window's tokens, and the frames after which the next window begins.

    first_time: id of `<|0.00|>`. frames: length of the window. Tokens after the last complete segment are dropped, and
    their audio belongs to the next window, unless the window ends with silence: then a single timestamp ends it. (The
    reference's `transcribe`, Radford et al. 2022.)"""
    is_time = [token >= first_time for token in tokens]
    ends = [at for at in range(1, len(tokens)) if is_time[at - 1] and is_time[at]]
    single = is_time[-2:] == [False, True]
    if not ends:
        times = [token - first_time for token in tokens if token >= first_time]
        length = times[-1] * STEP_S if times and times[-1] > 0 else frames * STEP_S / FRAMES_PER_STEP
        return [Cut(0.0, length, tuple(tokens))], frames
    cuts, begin = list[Cut](), 0
    for end in [*ends, *([len(tokens)] if single else [])]:
        part = tokens[begin:end]
        cuts.append(Cut((part[0] - first_time) * STEP_S, (part[-1] - first_time) * STEP_S, tuple(part)))
        begin = end
    return cuts, frames if single else (tokens[begin - 1] - first_time) * FRAMES_PER_STEP
