"""Replicas: copies of blocks between nodes, of a stream for its buddy node, or of a prefix that another node fetches.

The source holds the blocks until the transfer ends. The receiver holds a copy's blocks until they have arrived. Then
they are cached like all blocks: found by their hashes, and evicted when memory is needed."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Sequence
from heapq import nlargest

from kvferry.engine.auxiliary_blocks import AuxiliaryBlocks
from kvferry.engine.block_interfaces import GRANT, SHIP
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.migration import streams
from kvferry.engine.request import Key, Request
from kvferry.engine.request_table import RequestTable
from kvferry.protocol.errors import GrantRefused
from kvferry.protocol.messages import DecodeTarget

MIN_BLOCKS = 8
"""Fewest new full blocks of a stream that are worth a copy."""
SHARE = 16
"""Copy once 1/SHARE of the stream is new, if that is more than MIN_BLOCKS.

Each copy makes the receiver check the whole chain."""
RESERVE_DIVISOR = 4
"""The receiver keeps 1/RESERVE_DIVISOR of its blocks available."""


class Replicas:
    """Replicas in transfer: sent by transfer id, received by grant.

    states: auxiliary blocks, which are copied with the blocks of a chain; None for models without. Owned by the engine
    thread."""

    def __init__(self, pool: BlockPool, request_table: RequestTable, states: AuxiliaryBlocks | None = None) -> None:
        self._pool, self._request_table, self._states = pool, request_table, states
        self._transfer_holds: dict[int, list[int]] = {}
        self._landing: dict[Hashable, tuple[Sequence[bytes], list[int], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._transfer_holds or self._landing)

    @property
    def transfer_holds(self) -> Collection[int]:
        """Transfer ids of replicas being sent."""
        return self._transfer_holds.keys()

    @property
    def landing(self) -> Collection[Hashable]:
        """Grants of replicas being received."""
        return self._landing.keys()

    # Sender.

    def due(self, limit: int, without: Container[Key] = (), apart: Container[DecodeTarget] = ()) -> list[Request]:
        """Return at most `limit` streams with enough new blocks to copy, those with most first.

        without: streams to skip; apart: buddies to leave alone."""
        running = self._request_table.running
        due = [r for r in running if self._enough(r) and r.key not in without and r.job.buddy not in apart]
        return nlargest(limit, due, key=self._uncopied)

    def copyable(self, request: Request) -> int:
        """Return how many leading blocks a copy has: all full ones, or those from which the stream can continue."""
        return request.registered if self._states is None else self._states.held(request)

    def chain(self, request: Request, length: int) -> list[int] | None:
        """Return the stream's first `length` blocks with their auxiliary blocks.

        None if the stream ended or lost any of them."""
        if self._request_table.find(request.key) is not request or request.registered < length:
            return None
        if self._states is None:
            return request.block_ids[:length]
        names = self._states.chain(request.hashes[:length])
        found = self._pool.match(names)
        return found if len(found) == len(names) else None

    def hold_copy(self, transfer: int, chain: Sequence[int], first: int) -> list[tuple[int, int]]:
        """Hold blocks of `chain` for a transfer, and return (index, block id) of those from `first` on.

        They stay unchanged until `returned`. So do the blocks before `first`, for a chain is held as a whole."""
        self._transfer_holds[transfer] = list(chain)
        self._pool.acquire(("ship", transfer), SHIP, chain, 0)
        return list(enumerate(chain))[first:]

    def hold_chain(self, transfer: int, block_ids: Sequence[int]) -> None:
        """Hold a chain that was just found here until `returned`, while it is sent to the node that asked for it."""
        self._transfer_holds[transfer] = list(block_ids)
        self._pool.acquire(("ship", transfer), SHIP, block_ids, 0)

    def returned(self, transfer: int) -> None:
        """Release the blocks of a copy: no send touches them any more."""
        self._pool.release(("ship", transfer), SHIP, self._transfer_holds.pop(transfer, []))

    def _uncopied(self, request: Request) -> int:
        """Return how many blocks are not copied yet.

        A buddy that was not asked yet is assumed to have the blocks that came with the job, because it usually computed
        them."""
        had = request.copied if request.copied is not None else len(request.job.token_ids) // request.block_size
        return self.copyable(request) - had

    def _enough(self, request: Request) -> bool:
        if request.job.buddy is None or not streams(request):
            return False
        return self._uncopied(request) >= max(MIN_BLOCKS, request.registered // SHARE)

    # Receiver.

    def reserve(self, grant: Hashable, hashes: Sequence[bytes], limit: int) -> tuple[int, list[int]]:
        """Reserve blocks for a replica; return how many leading blocks are here, and blocks for the next `limit`.

        All stay held until `quiet`. Raises GrantRefused where streams and prompts might need the memory."""
        if not self._pool.prefix_caching:
            raise GrantRefused("the prefix cache is off")
        here = self._pool.match(hashes)
        fresh = min(limit, len(hashes) - len(here))
        block_ids = self._pool.acquire(grant, GRANT, here, fresh, keep=self._pool.num_blocks // RESERVE_DIVISOR)
        if block_ids is None:
            raise GrantRefused("the pool has no room for copies")
        self._landing[grant] = (hashes, block_ids, len(here))
        self._pool.miss_reasons.note(hashes[len(here) : len(block_ids)], "not_arrived")
        return len(here), block_ids[len(here) :]

    def land(self, grant: Hashable, *, tiers: bool = True) -> tuple[int, int]:
        """Register all blocks of a replica that has arrived intact. tiers: whether tiers keep them.

        Return (first, end): the range of the chain's token blocks that it brought."""
        hashes, block_ids, first = self._landing[grant]
        for index in range(first, len(block_ids)):
            before = index - 1 if self._states is None else self._states.parent(index, len(hashes))
            parent = block_ids[before] if before >= 0 else None
            block_ids[index] = self._pool.register(
                [(grant, GRANT)], block_ids[index], hashes[index], parent, tiers=tiers
            )
        self.quiet(grant)
        if self._states is None:
            return first, len(block_ids)
        return self._states.tokens_before(first, len(hashes)), self._states.tokens_before(len(block_ids), len(hashes))

    def quiet(self, grant: Hashable) -> None:
        """Release the blocks of a grant: no receive touches them any more."""
        _, block_ids, _ = self._landing.pop(grant, ((), [], 0))
        self._pool.release(grant, GRANT, block_ids)
