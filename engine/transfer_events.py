"""Builds engine events of KV transfers: request admitted, blocks ready to receive into, blocks ready to send."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.engine.events import Admitted, Computed, Event, Reserved
from kvferry.engine.request import Request, held_blocks


def admitted(request: Request) -> Iterator[Event]:
    """Report that a request got its blocks; the blocks of a grant, token blocks first, can now be received into."""
    assert request.admitted is not None
    if request.grant is not None:
        yield Reserved(request.grant, request.first_block, tuple(held_blocks(request)[request.first_block :]))
    queried = len(request.token_ids)
    yield Admitted(request.key, request.admitted - request.arrived, queried, request.cached_len or 0)


def to_ship(request: Request, upto: int) -> list[Event]:
    """Announce computed blocks before index `upto` that the decode node lacks and that were not announced yet."""
    assert request.transfer is not None
    begin = max(request.shipped, request.first_block)
    if upto <= begin:
        return []
    request.shipped = upto
    return [Computed(request.transfer, tuple((i, request.block_ids[i]) for i in range(begin, upto)))]


def state_to_ship(request: Request) -> list[Event]:
    """Announce the blocks of the request's recurrent state, which follow those of its tokens."""
    assert request.transfer is not None
    return [Computed(request.transfer, tuple(enumerate(request.state_blocks, len(request.block_ids))))]
