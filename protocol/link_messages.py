"""Messages on the link between one prefill and one decode process.

`transfer` names one ship and is never reused by that prefill process.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Job, TokenDelta
from protocol.wire import message


@message(30, checked=True)
@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Prefill → decode over the link: reserve blocks for this job and post receives for them."""

    transfer: int
    epoch: int
    fingerprint: str
    job: Job


@message(31, checked=True)
@dataclass(frozen=True, slots=True)
class Grant:
    """Decode → prefill: receives are posted for prompt blocks first_block … first_block + block_count - 1; decode
    already holds the earlier ones (`cached_len` = first_block * block_size tokens). `nonce` separates the tags of
    connections."""

    transfer: int
    first_block: int
    block_count: int
    nonce: int


@message(32, checked=True)
@dataclass(frozen=True, slots=True)
class Refusal:
    """Decode → prefill: no grant, or the ship failed on this side. `code` names a class of protocol.errors."""

    transfer: int
    code: str
    message: str


@message(33, checked=True)
@dataclass(frozen=True, slots=True)
class Commit:
    """Prefill → decode, last message of a ship: every block was sent. checksums: CRC32 per shipped block, in order (-1:
    not taken for this block), or empty where the sender took none. `first` is the delta with the first token; `reuse`
    the prompt's accounting."""

    transfer: int
    block_count: int
    checksums: tuple[int, ...]
    first: TokenDelta


@message(34, checked=True)
@dataclass(frozen=True, slots=True)
class CommitAck:
    """Decode → prefill: all blocks landed and verified; the sender may forget the transfer."""

    transfer: int


@message(35, checked=True)
@dataclass(frozen=True, slots=True)
class Abort:
    """Prefill → decode: the ship will not be completed; free the grant once its receives are quiet."""

    transfer: int
    reason: str
