"""Control messages of the link between two nodes that transfers KV: grants, commits, fetches, copies and aborts.

`transfer` numbers one ship; the sending process never reuses it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import DecodeTarget, Job, TokenDelta
from kvferry.protocol.process_names import NOBODY, NodeName
from kvferry.protocol.wire import message


@message(48, checked=True)
@dataclass(frozen=True, slots=True)
class Copy:
    """Request to a stream's buddy to keep the KV of these tokens, in full blocks.

    most: maximum number of missing blocks to take. namespace, adapter: parts of the root of their hashes,
    as in a Job. media: of the tokens, without data. With recurrent layers, the tokens end at a checkpoint, whose blocks
    follow theirs."""

    token_ids: tuple[int, ...]
    most: int
    namespace: str = ""
    adapter: str = ""
    deadline_s: float = 600.0
    media: tuple[MediaItem, ...] = ()


@message(56, checked=True)
@dataclass(frozen=True, slots=True)
class Fetch:
    """Any node → any other: request for cached blocks.

    Answered on the same connection by a GrantRequest for a Supply, or by NoSupply. transfer: number chosen by the
    asker. asker: the node as the target of a grant. hashes: of a prompt's leading blocks, in order; the asker has the
    first `first`. deadline_s: seconds after which the asker no longer waits. embeddings: the blocks hold the rows of
    one image, audio or video; all or none of them are sent, for an EmbeddingSupply."""

    transfer: int
    asker: DecodeTarget
    first: int
    hashes: bytes
    deadline_s: float
    embeddings: bool = False


@message(57, checked=True)
@dataclass(frozen=True, slots=True)
class Supply:
    """Answer to a fetch: the first `count` of its blocks are held, and are sent once they are granted.

    With recurrent layers, the last of them are those of the checkpoint at which the prefix ends."""

    fetch: int
    count: int
    deadline_s: float = 600.0


@message(78, checked=True)
@dataclass(frozen=True, slots=True)
class EmbeddingSupply:
    """Answer to a fetch of embeddings: all `count` blocks are held, and are sent once they are granted."""

    fetch: int
    count: int
    deadline_s: float = 600.0


@message(58, checked=True)
@dataclass(frozen=True, slots=True)
class NoSupply:
    """Negative answer to the fetch `transfer`. `code` names a class of protocol.errors."""

    transfer: int
    code: str
    message: str


GrantPurpose = Job | Copy | Supply | EmbeddingSupply
"""Contents of a grant request."""


@message(30, checked=True)
@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Prefill → decode over the link: reserve blocks for this job and post receives for them.

    Also decode → any node for a copy, and any node → the asker of a fetch for a supply."""

    transfer: int
    epoch: int
    fingerprint: str
    asked: GrantPurpose


@message(31, checked=True)
@dataclass(frozen=True, slots=True)
class Grant:
    """Decode → prefill: receives are posted for prompt blocks first_block … first_block + block_count - 1.

    Decode already holds the earlier blocks (`cached_len` = first_block * block_size tokens). With recurrent layers, the
    state's blocks follow the prompt's. `nonce` separates the tags of connections."""

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

    checksums: one per shipped block, in order (-1: none for this block), or empty if the sender computed none. first:
    the delta with the first token and the prompt's reuse account; None for a copy or supply. For a migrating stream it
    has all tokens generated since the offer. covered: leading tokens whose KV is in the blocks; 0: those of the job.
    sender: the process that computed or held the blocks."""

    transfer: int
    block_count: int
    checksums: tuple[int, ...]
    first: TokenDelta | None
    covered: int = 0
    sender: NodeName = NOBODY


@message(34, checked=True)
@dataclass(frozen=True, slots=True)
class CommitAck:
    """Decode → prefill: all blocks arrived and were verified; the sender may forget the transfer."""

    transfer: int


@message(35, checked=True)
@dataclass(frozen=True, slots=True)
class Abort:
    """Prefill → decode: the ship will not be completed; free the grant once its receives have ended."""

    transfer: int
    reason: str


@message(47, checked=True)
@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Terms that each end of a link sends in the handshake.

    address: of the UCX worker that it uses for this connection. settings: (name, value) pairs that both ends must
    share."""

    address: bytes
    settings: tuple[tuple[str, str], ...]
