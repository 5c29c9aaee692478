"""Validation of control messages from the wire: `read` decodes one, and checks its field types and bounds.

The codec checks only the number of fields, and a peer may have another version or be broken."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from kvferry.kv_transfer.checksum import MAX_CHECKSUM, UNVERIFIED
from kvferry.kv_transfer.tags import MAX_BLOCKS, MAX_NONCE
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.protocol.link_messages import (
    Abort,
    Commit,
    CommitAck,
    Copy,
    EmbeddingSupply,
    Fetch,
    Grant,
    GrantRequest,
    NoSupply,
    Refusal,
    Supply,
)
from kvferry.protocol.media import RenderedPrompt
from kvferry.protocol.messages import Job
from kvferry.protocol.wire import WireError, unpack
from kvferry.protocol.work import Generate

Check = Callable[[Any], bool]
INTEGERS = range(-(1 << 63), 1 << 63)
"""Integers that fit into 64 bits with sign."""
MAX_DEADLINE_S = 1e9
"""Maximum time until a request's deadline, in seconds."""


def read(data: bytes, expected: Any) -> Any:
    """Return the decoded message, of an `expected` class. Raises WireError for anything else."""
    message = unpack(data)
    if not isinstance(message, expected):
        raise WireError(f"a {type(message).__name__} is not a message for this side")
    if not (_checker(message.__class__)(message) and message.transfer > 0 and _within_bounds(message)):
        raise WireError(f"a {type(message).__name__} with a field of the wrong type or out of bounds")
    return message


def _within_bounds(message: Any) -> bool:
    match message:
        case GrantRequest(asked=purpose):
            return _request_within_bounds(purpose)
        case Grant(first_block=first, block_count=count, nonce=nonce):
            return first >= 0 and count >= 0 and first + count <= MAX_BLOCKS and 0 < nonce <= MAX_NONCE
        case Commit(block_count=count, checksums=checksums):
            return 0 <= count <= MAX_BLOCKS and all(UNVERIFIED <= taken <= MAX_CHECKSUM for taken in checksums)
        case Fetch(first=first, hashes=hashes, deadline_s=deadline_s):
            count, rest = divmod(len(hashes), HASH_BYTES)
            return not rest and 0 <= first < count <= MAX_BLOCKS and 0 <= deadline_s <= MAX_DEADLINE_S
        case Refusal() | Abort() | CommitAck() | NoSupply():
            return True
    return False


def _request_within_bounds(purpose: Any) -> bool:
    match purpose:
        case Supply(fetch, count, deadline_s) | EmbeddingSupply(fetch, count, deadline_s):
            return fetch > 0 and 0 < count <= MAX_BLOCKS and 0 <= deadline_s <= MAX_DEADLINE_S
        case Copy():
            return _copy_within_bounds(purpose)
    return _job_within_bounds(purpose)


def _job_within_bounds(job: Job) -> bool:
    """Check a job. Only work that generates has blocks to ship."""
    lengths = 0 < job.prompt_len <= len(job.token_ids)
    if not (isinstance(job.work, Generate) and lengths and min(job.token_ids) >= 0):
        return False
    if job.media or job.rope_offset:
        lengths = RenderedPrompt(job.token_ids[: job.prompt_len], job.media, job.rope_offset).sound
    return lengths and 0 <= job.deadline_s <= MAX_DEADLINE_S


def _copy_within_bounds(copy: Copy) -> bool:
    """Check a copy, with tokens that fit into 31 bits.

    They are hashed as 32-bit numbers before an engine checks them."""
    tokens = bool(copy.token_ids) and 0 <= min(copy.token_ids) <= max(copy.token_ids) < 1 << 31
    media = RenderedPrompt(copy.token_ids, copy.media).sound
    return tokens and media and 0 < copy.most <= MAX_BLOCKS and 0 <= copy.deadline_s <= MAX_DEADLINE_S


@cache
def _checker(kind: Hashable) -> Check:
    """Return a type check for a declared type: plain types, tuples, unions, and frozen dataclasses of them."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        checks = [(field.name, _checker(hints[field.name])) for field in fields(kind)]
        return lambda value: isinstance(value, kind) and all(check(getattr(value, name)) for name, check in checks)
    if isinstance(kind, UnionType):
        members = [_checker(member) for member in get_args(kind)]
        return lambda value: any(check(value) for check in members)
    if get_origin(kind) is tuple:
        return _tuple_checker(*get_args(kind))
    return _PLAIN[kind]


def _tuple_checker(*kinds: Any) -> Check:
    if kinds == (int, ...):
        return _are_integers
    checks = [_checker(kind) for kind in kinds if kind is not Ellipsis]
    if Ellipsis in kinds:
        return lambda value: isinstance(value, tuple) and all(map(checks[0], value))
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _are_integers(value: Any) -> bool:
    """Check a tuple of integers without a Python call for each: a prompt may have hundreds of thousands of tokens."""
    try:
        return isinstance(value, tuple) and array("q", value).itemsize == 8
    except (TypeError, OverflowError):
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_PLAIN: dict[Any, Check] = {
    int: lambda value: type(value) is int and value in INTEGERS,
    float: _is_number,
    bool: lambda value: type(value) is bool,
    str: lambda value: isinstance(value, str),
    bytes: lambda value: isinstance(value, bytes),
    NoneType: lambda value: value is None,
}
