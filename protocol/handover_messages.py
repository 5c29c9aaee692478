"""Messages between two adapters, by which the engine of one computes a prompt and the engine of the other decodes.

The engines transfer the blocks themselves; the adapters pass on where they are. Durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.messages import Job
from kvferry.protocol.process_names import NodeName
from kvferry.protocol.wire import message

IN_ROOM = -1
"""First token of a prompt that is being computed."""


@message(60, checked=True)
@dataclass(frozen=True, slots=True)
class HandoverOffer:
    """Prefill → decode, `POST /attempts/handover/offer`, while the prompt is computed; answered by a HandoverTicket.

    sender: the prefill node. decode_epoch: of the process that the offer is for."""

    request_id: str
    attempt: int
    sender: NodeName
    decode_epoch: int


@message(61, checked=True)
@dataclass(frozen=True, slots=True)
class HandoverTicket:
    """Decode → prefill: permits one handover. The decode node measures the reference's age from here on."""

    ticket: str


@message(62, checked=True)
@dataclass(frozen=True, slots=True)
class Handover:
    """Prefill → decode, `POST /attempts/handover`; answered once the decode engine has all blocks, or has failed.

    ticket        of the offer
    sender        the prefill node
    decode_epoch  of the process that is meant
    length        how many of the job's tokens the blocks are of
    first_token   that the prefill engine drew after them; IN_ROOM: the prompt is computed while the blocks travel
    reference     the blocks' place in the engine's own words
    age_s         seconds from the end of the prefill to the arrival of the ticket; negative if it arrived before
    lease_s       seconds for which the prefill engine keeps the blocks"""

    job: Job
    ticket: str
    sender: NodeName
    decode_epoch: int
    length: int
    first_token: int
    reference: str
    age_s: float
    lease_s: float


@message(63, checked=True)
@dataclass(frozen=True, slots=True)
class RoomFirstToken:
    """Decode → prefill, answer to a Handover of a room: the first token that came with the blocks."""

    first_token: int
