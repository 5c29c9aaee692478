"""Seeded damage to messages: bytes and fields that no honest peer sends."""

from __future__ import annotations

import random
import typing
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any

from kvferry.protocol.wire import Unwritable, pack

ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "x", "\0", "é" * 999,
    b"", b"\xff", (), (None,), ((),), {}, {"a": 1}, {1: {2: 3}}, (0,) * 5000, "9" * 5000,
]  # fmt: skip


def made(hint: Any, rng: random.Random) -> Any:
    """A value that fits a declared type."""
    if is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return hint(**{field.name: made(hints[field.name], rng) for field in fields(hint)})
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (UnionType, typing.Union):
        return made(rng.choice(args), rng)
    if typing.get_origin(hint) is tuple:
        kinds = [args[0]] * rng.randrange(4) if args[-1] is Ellipsis else args
        return tuple(made(kind, rng) for kind in kinds)
    plain = {int: rng.randrange(1, 50), float: rng.random(), str: "x", bool: True, bytes: b"abcd", type(None): None}
    return plain[hint]


def damaged(message: Any, rng: random.Random) -> Any:
    """The same message with one field, at any depth, that is something else."""
    if isinstance(message, tuple) and message and rng.random() < 0.8:
        place = rng.randrange(len(message))
        return (*message[:place], damaged(message[place], rng), *message[place + 1 :])
    if is_dataclass(message) and fields(message):
        name = rng.choice(fields(message)).name
        value = getattr(message, name)
        deeper = (is_dataclass(value) or isinstance(value, tuple)) and rng.random() < 0.7
        return replace(message, **{name: damaged(value, rng) if deeper else rng.choice(ODD)})  # type: ignore[type-var]
    return rng.choice(ODD)


def mutated(message: Any, rng: random.Random) -> bytes:
    """Bytes of a damaged message, or damaged bytes of a whole one."""
    try:
        data = bytearray(pack(damaged(message, rng) if rng.random() < 0.6 else message))
    except (Unwritable, TypeError):
        data = bytearray(pack(message))
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data[rng.randrange(len(data)) : 0] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            at = rng.randrange(len(data))
            data += data[at : at + 40] * rng.randrange(1, 4)
    return bytes(data)
