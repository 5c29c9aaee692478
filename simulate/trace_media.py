"""`media_of`: reads the images and audio of a trace's request.

They are objects in the prompt's order: `id` (equal for equal content), `offset` (the prompt's tokens before it) and
either `tokens` or, for audio, `audio_s` (seconds)."""

from __future__ import annotations

from math import ceil
from typing import Any

from kvferry.simulate.trace_request import Medium

MAX_AUDIO_S = 24 * 3600
"""Longest audio, in seconds."""


def media_of(rows: Any, prompt: int, audio_tokens_per_s: float) -> tuple[Medium, ...]:
    """Return the media of a request with a prompt of so many tokens. Raises ValueError naming the field."""
    if rows is None:
        return ()
    if type(rows) is not list:
        raise ValueError("media must be a list")
    found, behind = list[Medium](), 0
    for place, row in enumerate(rows):
        each = _medium(row, f"media[{place}]", audio_tokens_per_s)
        if not behind <= each.offset <= prompt - each.length:
            raise ValueError(
                f"media[{place}] takes the tokens from {each.offset} to {each.offset + each.length}; it must lie "
                f"between {behind} and input_length {prompt}"
            )
        behind = each.offset + each.length
        found.append(each)
    return tuple(found)


def _medium(row: Any, field: str, audio_tokens_per_s: float) -> Medium:
    if type(row) is not dict:
        raise ValueError(f"{field} must be an object")
    if type(name := row.get("id")) not in (int, str):
        raise ValueError(f"{field}.id must be an integer or a string, not {name!r}")
    if ("tokens" in row) == ("audio_s" in row):
        raise ValueError(f"{field} must have either tokens or audio_s")
    if "audio_s" in row:
        seconds = row["audio_s"]
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_AUDIO_S:
            raise ValueError(f"{field}.audio_s must be above 0 and at most {MAX_AUDIO_S}, not {seconds!r}")
        length = ceil(seconds * audio_tokens_per_s)
    else:
        length = row["tokens"]
    for key, value, least in (("offset", row.get("offset"), 0), ("tokens", length, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{field}.{key} must be an integer from {least} on, not {value!r}")
    return Medium(str(name), row["offset"], length)
