"""`read_trace`: reads request traces in Mooncake's published format (JSON lines with hash ids).

Each JSON line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`. There is one hash id per
512 prompt tokens; equal ids mean that the prompts are equal up to there. `media` is ours and may be missing: see
`trace_media`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.simulate.machine import Machine
from kvferry.simulate.trace_media import media_of
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import hashes_of

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
ID_TOKENS = 512
"""Prompt tokens of one hash id."""
MAX_TOKENS = 1 << 24
"""Maximum length of a prompt or output, in tokens."""
MAX_MS = 10**15
"""Largest timestamp in milliseconds, beyond which a float loses milliseconds."""


def read_trace(path: Path, machine: Machine, *, speed: float = 1.0, most: int = 0) -> list[TraceRequest]:
    """Return the first `most` requests of the trace (0: all), shifted to begin at 0.

    machine: gives the size of blocks, and the tokens of a second of audio. speed: factor by which they arrive faster.
    Lines need not be in order of time. Raises ConfigError naming the wrong line."""
    block_size = machine.block_size
    if ID_TOKENS % block_size:
        raise ConfigError(
            f"block_size must divide {ID_TOKENS}, the tokens of a hash id, got {block_size}", param="block_size"
        )
    if not speed > 0:
        raise ConfigError(f"speed must be above 0, not {speed}", param="load")
    try:
        with path.open(encoding="utf-8") as lines:
            trace = list(_asks(lines, machine, speed, most, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="trace") from error
    if not trace:
        raise ConfigError(f"{path} has no requests", param="trace")
    begun = min(ask.at for ask in trace)
    return [replace(ask, at=ask.at - begun) for ask in trace]


def _asks(lines: Iterable[str], machine: Machine, speed: float, most: int, path: Path) -> Iterator[TraceRequest]:
    number = 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _ask(number, json.loads(line), machine, speed)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {line_number} is not valid JSON: {error.msg}", param="trace") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {line_number}: {error}", param="trace") from error
        number += 1
        if number == most:
            return


def _ask(number: int, row: Any, machine: Machine, speed: float) -> TraceRequest:
    if type(row) is not dict:
        raise ValueError("a request must be an object")
    if missing := [name for name in FIELDS if name not in row]:
        raise ValueError(f"{missing[0]} is missing")
    at, prompt, output, ids = (row[name] for name in FIELDS)
    for name, value, least in (("input_length", prompt, 1), ("output_length", output, 0)):
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            raise ValueError(f"{name} must be from {least} to {MAX_TOKENS}, not {value!r}")
    if type(at) not in (int, float) or not 0 <= at <= MAX_MS:
        raise ValueError(f"timestamp must be milliseconds from 0 to {MAX_MS:g}, not {at!r}")
    if type(ids) is not list or any(type(each) is not int or not 0 <= each < 2**63 for each in ids):
        raise ValueError("hash_ids must be a list of integers from 0 on")
    most = -(-prompt // ID_TOKENS)
    if not most - 1 <= len(ids) <= most:
        raise ValueError(
            f"hash_ids must be {most - 1} or {most} for input_length {prompt}, one for each {ID_TOKENS} tokens, not "
            f"{len(ids)}"
        )
    media, block_size = media_of(row.get("media"), prompt, machine.audio_tokens_per_s), machine.block_size
    pieces = _split(ids, block_size)
    whole = prompt // block_size
    hashes = pieces[:whole]
    if len(hashes) == whole and output:
        own = hashes_of([(f"own{number}", prompt - whole * block_size + max(1, output))], block_size)
        hashes = [*hashes, *own]
    session = str(ids[0]) if ids else str(number)
    return TraceRequest(number, at / 1000 / speed, prompt, max(1, output), tuple(hashes), session=session, media=media)


def _split(ids: list[int], block_size: int) -> list[bytes]:
    """Return the block hashes of hash ids.

    They are equal only where all ids before are equal too, even if a file uses the same id elsewhere."""
    found: list[bytes] = []
    parent = b""
    for each in ids:
        parent = blake2b(parent + each.to_bytes(8, "big"), digest_size=8).digest()
        found += [parent + part.to_bytes(HASH_BYTES - 8, "big") for part in range(ID_TOKENS // block_size)]
    return found
