"""Control messages of the link between two nodes: grants, commits, fetches, copies and aborts.

`transfer` names one ship and is never reused by that prefill process.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.messages import DecodeTarget, Job, TokenDelta
from kvferry.protocol.process_names import NOBODY, NodeName
from kvferry.protocol.wire import message


@message(48, checked=True)
@dataclass(frozen=True, slots=True)
class Copy:
    """Request to a stream's buddy: keep the K/V of these tokens in full blocks.

    It takes the first `most` of the blocks that it lacks. namespace, adapter: parts of the root of their hashes, as in
    a Job. namespace, adapter: parts of the root of their hashes, as in a Job."""

    token_ids: tuple[int, ...]
    most: int
    namespace: str = ""
    adapter: str = ""
    deadline_s: float = 600.0


@message(56, checked=True)
@dataclass(frozen=True, slots=True)
class Fetch:
    """Any node → any other: send me what you hold of these blocks.

    Answered on the same connection by a GrantRequest for a Supply, or by NoSupply. `transfer` numbers it, by who asks;
    asker: as a grant is asked for there. hashes: of a prompt's leading blocks, one behind the other, of which the asker
    has the first `first`. deadline_s: after which nobody waits for them any more."""

    transfer: int
    asker: DecodeTarget
    first: int
    hashes: bytes
    deadline_s: float


@message(57, checked=True)
@dataclass(frozen=True, slots=True)
class Supply:
    """Answer to a fetch: the first `count` of its blocks are held, and sent if they are granted."""

    fetch: int
    count: int
    deadline_s: float = 600.0


@message(58, checked=True)
@dataclass(frozen=True, slots=True)
class NoSupply:
    """The answer to the fetch `transfer`: nothing comes. `code` names a class of protocol.errors."""

    transfer: int
    code: str
    message: str


Asked = Job | Copy | Supply
"""What blocks may be granted for."""


@message(30, checked=True)
@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Prefill → decode over the link: reserve blocks for this job and post receives for them.

    Or decode → any node: for this copy; or any node → any that asked for it: for this supply."""

    transfer: int
    epoch: int
    fingerprint: str
    asked: Asked


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
    """Prefill → decode, last message of a ship: every block was sent.

    checksums: one per shipped block, in order (-1: not taken for this block), or empty where the sender took none.
    `first` is the delta with the first token; `reuse` the prompt's accounting. A stream that moves brings all tokens
    that were drawn since it was offered; `covered` tokens in front have their K/V in the blocks (0: those of the job).
    Of a copy or a supply `first` is None. `sender` computed them, or had them."""

    transfer: int
    block_count: int
    checksums: tuple[int, ...]
    first: TokenDelta | None
    covered: int = 0
    sender: NodeName = NOBODY


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


@message(47, checked=True)
@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Terms that each end of a link sends in the handshake.

    The address of the UCX worker that it keeps for this connection, and (name, value) of the settings that both must
    share."""

    address: bytes
    settings: tuple[tuple[str, str], ...]
