"""GGUF headers whose fields have other types, counts and nesting than they should."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.model_files.gguf import GGUFTensor, read_gguf

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KEYS = ("general.alignment", "split.count", "split.no", "tokenizer.ggml.add_bos_token", "llama.rope.scaling.type",
        "llama.rope.dimension_count", "llama.vocab_size", "llama.expert_count", "general.file_type")  # fmt: skip
"""Fields that the whole file lacks and readers look for."""


def fields_mutated(chance: random.Random, file: Path) -> tuple[bytes, str]:
    """The file with some fields of its header written anew, and what was done to them."""
    whole = _whole(file)
    fields, tensors = dict(whole.fields), whole.tensors
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        name = chance.choice(KEYS if chance.random() < 0.3 else list(fields))
        fields[name], said = odd_field(chance)
        done.append(f"{name} = {said}")
    counts = [3, len(tensors), len(fields)]
    if chance.random() < 0.1:
        place = chance.randrange(3)
        counts[place] = chance.choice((0, 1, 2, counts[place] + 1, 2**31, 2**62))
        done.append(f"counts {counts}")
    head = b"GGUF" + struct.pack("<IQQ", counts[0] % 2**32, *counts[1:])
    head += b"".join(text(name) + value for name, value in fields.items())
    start = min(tensor.offset for tensor in tensors)
    for tensor in tensors:
        shape = tensor.shape[::-1]
        head += text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", tensor.type, tensor.offset - start)
    return head + bytes(-len(head) % 32) + whole.data[start:], ", ".join(done)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A file that is whole. fields: its metadata by name, as in a header."""

    fields: Mapping[str, bytes]
    tensors: Sequence[GGUFTensor]
    data: bytes


@cache
def _whole(file: Path) -> _Whole:
    found = read_gguf(file)
    fields = {name: field_of(value) for name, value in found.metadata.items()}
    return _Whole(fields, list(found.tensors.values()), file.read_bytes())


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def field_of(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool | int | float):
        kind = 7 if isinstance(value, bool) else 12 if isinstance(value, float) else 4
        return struct.pack(f"<I{SCALARS[kind]}", kind, value)
    items = list(value)
    if items and isinstance(items[0], str):
        return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(text, items))
    kind = 6 if items and isinstance(items[0], float) else 5
    return struct.pack(f"<IIQ{len(items)}{SCALARS[kind]}", 9, kind, len(items), *items)


def odd_field(chance: random.Random) -> tuple[bytes, str]:
    """A value of any type: a scalar at its bounds, a text, an array of few or of none, arrays in arrays."""
    match chance.randrange(5):
        case 0 | 1:
            kind = chance.choice(list(SCALARS))
            data = chance.choice((bytes(8), b"\xff" * 8, b"\x01" + bytes(7), chance.randbytes(8)))
            data = data[: struct.calcsize("<" + SCALARS[kind])]
            return struct.pack("<I", kind) + data, f"{SCALARS[kind]} {data.hex()}"
        case 2:
            said = chance.choice(("", "x", "gpt2", "llama", "yarn", "é" * 9, "\0", "9" * 400))
            return field_of(said), f"{said[:20]!r}"
        case 3:
            said_items: list[Any] = chance.choice(([], [0], [-1, 2], [1.5] * 3, ["a"], ["", "<s>"], ["a"] * 300))
            return field_of(said_items), f"{said_items[:3]!r}"
        case _:
            levels, width = chance.choice((1, 2, 3, 4, 5, 50, 3000)), chance.choice((0, 1, 1))
            inner = struct.pack("<IQ", 9, width) * levels + struct.pack("<IQ", 5, 0)
            return struct.pack("<I", 9) + inner, f"{levels} arrays of {width} in each other"
