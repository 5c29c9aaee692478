"""Failures of attempts and the nodes at fault."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from kvferry.placement.types import Placement
from kvferry.protocol.errors import GrantRefused, Incompatible, KvferryError, Moved, NodeLost, TransferFailed, from_body
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import AttemptFailed

log = logging.getLogger(__name__)

Work = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt ended without finishing.

    `culprits`: the node to blame, as far as the router can tell, or the prefill and the decode node that do not reach
    each other; `works`: what the first of them was to do for it then."""

    attempt: int
    error: KvferryError
    culprits: tuple[NodeLease, ...]
    works: frozenset[Work] = frozenset()


def blamed(
    error: KvferryError, reporter: NodeLease, placement: Placement, *, decoding: bool = False
) -> tuple[NodeLease, ...]:
    """Return the nodes at fault for an error that the live node `reporter` reports.

    A refused grant is the decode node's doing. A node or a transfer that it misses: either of the two, or what lies
    between, unless all blocks had come and it was decoding."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is None or decode is None:
        return (reporter,)
    if reporter.role == "prefill" and isinstance(error, GrantRefused):
        return (decode,)
    if isinstance(error, NodeLost | TransferFailed | Incompatible) and not (reporter.role == "decode" and decoding):
        return (prefill, decode)
    return (reporter,)


def failure(
    attempt: int, error: KvferryError, culprits: tuple[NodeLease, ...], placement: Placement, *, decoding: bool
) -> Failure:
    """Build the failure of an attempt on that placement.

    A decode node without a prefill node computes the prompt too."""
    works: set[Work] = {"prefill"}
    if placement.decode and culprits[0].node_id == placement.decode.node_id:
        works = {"decode"} if placement.prefill or decoding else {"prefill", "decode"}
    return Failure(attempt, error, culprits, frozenset(works))


def error_of(failure: AttemptFailed) -> KvferryError:
    """Return the error that a node reported."""
    error = from_body({"error": {"code": failure.code, "message": failure.message}})
    if isinstance(error, Moved):
        error.later = failure.later
    return error


def known(error: Exception, node: NodeLease) -> KvferryError:
    """The error, or one in place of a mistake of our own: a request that waits for an answer must get one."""
    if isinstance(error, KvferryError):
        return error
    log.error("the call to %s failed", node.node_id, exc_info=error)
    return KvferryError("internal error of the router; its log has the details")
