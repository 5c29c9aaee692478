"""Traces in the form that Mooncake published: JSON lines with `timestamp` (milliseconds), `input_length`,
`output_length`, and `hash_ids`, one for each 512 tokens of the prompt, equal where everything up to there is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.hashing import HASH_BYTES
from simulate.ask import Ask
from simulate.workloads import hashes_of

ID_TOKENS = 512
MOST_TOKENS = 1 << 24


def read_trace(path: Path, block_size: int, *, speed: float = 1.0, most: int = 0) -> list[Ask]:
    """The first `most` requests (0: all), which come `speed` times as fast. Raises ConfigError with the line that is
    wrong."""
    if ID_TOKENS % block_size:
        raise ConfigError(
            f"block_size must divide {ID_TOKENS}, the tokens of a hash id, not be {block_size}", param="block_size"
        )
    if not speed > 0:
        raise ConfigError(f"speed must be above 0, not {speed}", param="speed")
    try:
        with path.open(encoding="utf-8") as lines:
            trace = list(_asks(lines, block_size, speed, most, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="trace") from error
    if not trace:
        raise ConfigError(f"{path} has no requests", param="trace")
    return trace


def _asks(lines: Iterable[str], block_size: int, speed: float, most: int, path: Path) -> Iterator[Ask]:
    number = 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _ask(number, json.loads(line), block_size, speed)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {line_number}: {type(error).__name__}: {error}", param="trace") from error
        number += 1
        if number == most:
            return


def _ask(number: int, row: Any, block_size: int, speed: float) -> Ask:
    at, prompt, output = row["timestamp"], row["input_length"], row["output_length"]
    ids = row["hash_ids"]
    for name, value, least in (("input_length", prompt, 1), ("output_length", output, 0)):
        if type(value) is not int or not least <= value <= MOST_TOKENS:
            raise ValueError(f"{name} must be from {least} to {MOST_TOKENS}, not {value!r}")
    if type(at) not in (int, float) or not 0 <= at < float("inf"):
        raise ValueError(f"timestamp must be milliseconds from 0 on, not {at!r}")
    if type(ids) is not list or any(type(each) is not int or not 0 <= each < 2**63 for each in ids):
        raise ValueError("hash_ids must be a list of integers from 0 on")
    if len(ids) * ID_TOKENS < prompt - ID_TOKENS or (len(ids) - 1) * ID_TOKENS >= prompt:
        raise ValueError(f"{len(ids)} hash_ids are not those of {prompt} tokens")
    pieces = _split(ids, block_size)
    whole = prompt // block_size
    hashes = pieces[:whole]
    if len(hashes) == whole and output:
        own = hashes_of([(f"own{number}", prompt - whole * block_size + max(1, output))], block_size)
        hashes = [*hashes, *own]
    session = str(ids[0]) if ids else str(number)
    return Ask(number, at / 1000 / speed, prompt, max(1, output), tuple(hashes), session=session)


def _split(ids: list[int], block_size: int) -> list[bytes]:
    """Each id as blocks."""
    width = HASH_BYTES - 8
    return [
        each.to_bytes(8, "big") + part.to_bytes(width, "big") for each in ids for part in range(ID_TOKENS // block_size)
    ]
