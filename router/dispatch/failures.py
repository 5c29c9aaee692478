"""Failure of an attempt, and which nodes are at fault for an error."""

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
"""Phases of a request that a node computes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """End of an attempt that did not finish.

    `at_fault` holds the node at fault as far as the router knows, or the prefill and decode node that do not reach
    each other. `works` are the phases that the first of them had to compute."""

    attempt: int
    error: KvferryError
    at_fault: tuple[NodeLease, ...]
    works: frozenset[Work] = frozenset()


def nodes_at_fault(
    error: KvferryError, reporter: NodeLease, placement: Placement, *, decoding: bool = False
) -> tuple[NodeLease, ...]:
    """Return the nodes at fault for an error that the live node `reporter` reports.

    The decode node is at fault for a refused grant. For a missing node or transfer, either node or the network between
    them may be at fault, so both are returned, unless the decode node had all blocks and was decoding."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is None or decode is None:
        return (reporter,)
    if reporter.role == "prefill" and isinstance(error, GrantRefused):
        return (decode,)
    if isinstance(error, NodeLost | TransferFailed | Incompatible) and not (reporter.role == "decode" and decoding):
        return (prefill, decode)
    return (reporter,)


def failure(
    attempt: int, error: KvferryError, at_fault: tuple[NodeLease, ...], placement: Placement, *, decoding: bool
) -> Failure:
    """Build the failure of an attempt on that placement.

    A decode node without a prefill node also computes the prompt."""
    works: set[Work] = {"prefill"}
    if placement.decode and at_fault[0].node_id == placement.decode.node_id:
        works = {"decode"} if placement.prefill or decoding else {"prefill", "decode"}
    return Failure(attempt, error, at_fault, frozenset(works))


def error_of(failure: AttemptFailed) -> KvferryError:
    """Return the error that a node reported."""
    error = from_body({"error": {"code": failure.code, "message": failure.message}})
    if isinstance(error, Moved):
        error.later = failure.later
    return error


def known(error: Exception, node: NodeLease) -> KvferryError:
    """Return a KvferryError as it is; log any other exception and return an internal error in its place.

    A request that waits for an answer must get one even after a bug in the router."""
    if isinstance(error, KvferryError):
        return error
    log.error("the call to %s failed", node.node_id, exc_info=error)
    return KvferryError("internal error of the router; its log has the details")
