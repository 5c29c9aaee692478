"""Eviction order of idle blocks by learned return rates: the blocks least likely to be used again soon go first.

All blocks of a pool have the same size and save the same number of tokens, so the value of keeping one is the rate at
which it is used again (see ReturnRates). It is learned from the pauses of each tenant's sessions, separately by the
prompts that a session had and by why it pauses, and for prefixes that several sessions share. Clients name sessions, or
they are recognised by their prefix. First prompts are told apart by whether anybody sent their beginning before. A
chain is evicted from its end, so a block that several sessions use stays as long as any of them. Operations are
O(log n) in the number of chains, amortised."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as joined
from itertools import islice

from kvferry.engine.cache_use import CacheUse, IdleStats, Pause
from kvferry.engine.idle_chain import AgedChains, IdleChain
from kvferry.engine.return_rates import ReturnClasses, ReturnRates, turn_level
from kvferry.protocol.labels import IDLE_KINDS, SESSION_RETURNS

REMEMBERED = 4
"""Limit of evicted blocks whose return is still noticed, as a multiple of the pool's blocks."""
SESSIONS = 4096
"""Maximum number of sessions' names that are remembered, and of requests' names."""
CLASSES = 1024
"""Maximum number of classes of blocks with rates of their own."""
CONTINUES = 0.8
"""A prompt continues a session if it begins with at least this share of the blocks of the session's last prompt."""
RANK_S = 1.0
"""Interval in seconds at which the values of all classes are recomputed."""
MAX_LEVEL = 5
"""Highest level of a class of shared blocks: 16 sessions and more."""
PAUSED, SHARED, COPIED, CLOSED = IDLE_KINDS
"""Kinds of idle blocks (protocol.labels): of a paused session, of several sessions, without a request so far, and of a
closed session."""


class ValueEviction:
    """Idle blocks of a pool, in eviction order. Owned by the engine thread.

    clock: seconds; None: time.monotonic. stats: totals, and the sessions that pause now."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: time.monotonic())
        self._idle: set[int] = set()
        self._chains: list[IdleChain | None] = [None] * num_blocks
        self._shares = [0] * num_blocks
        self._remembered: OrderedDict[bytes, IdleChain] = OrderedDict()
        self._max_remembered = REMEMBERED * num_blocks
        self._classes = ReturnClasses(CLASSES)
        self._aged = AgedChains()
        self._ranked = self._clock()
        self._sessions: OrderedDict[str, IdleChain] = OrderedDict()
        self._requests: OrderedDict[str, IdleChain] = OrderedDict()
        self._copied = IdleChain("", COPIED, self._rates("", COPIED, 0), self._ranked)
        self._given_up = IdleChain("", CLOSED, self._rates("", CLOSED, 0), self._ranked, closed=True)
        self.stats = IdleStats()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._idle

    # Requests.

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Learn that a request is about to use `reused`, the blocks of the first `hashes`; fill in cache_use."""
        now, cache_use.prompt = self._tick(), len(hashes)
        found = [self._chains[block_id] for block_id in reused]
        idle = Counter([chain for chain, block_id in zip(found, reused, strict=True) if block_id in self._idle])
        for chain, blocks in idle.items():
            if chain is not None:
                chain.returned(now, blocks)
        dropped = [*self._returned_late(now, hashes[len(reused) :])]
        before = self._sessions.get(cache_use.session) if cache_use.session else None
        if before is None:
            before = next((chain for chain in joined(reversed(dropped), reversed(found)) if chain is not None), None)
            if before is not None and len(found) + len(dropped) < CONTINUES * before.prompt:
                before = None
        if before is None:
            cache_use.turns, cache_use.shared = 0, len(reused)
            cache_use.known = bool(cache_use.session or found or dropped)
            for block_id in reused:
                self._shares[block_id] += 1
            return
        cache_use.turns, cache_use.shared, cache_use.known = before.turns + 1, min(before.shared, len(reused)), True
        kept, partial, lost = SESSION_RETURNS
        is_whole = len(found) >= min(before.prompt, len(hashes)) - 1
        self.stats.returns[kept if is_whole else partial if len(found) > before.shared else lost] += 1

    def rest(self, cache_use: CacheUse, block_ids: Sequence[int]) -> None:
        """Class the blocks of a request that ends, before they are `put`."""
        if not block_ids:
            return
        prompts = cache_use.turns + (cache_use.known or cache_use.pause == Pause.TOOL)
        own = self._leave_chain(cache_use, PAUSED, prompts, len(block_ids) - cache_use.shared)
        shared, shares = own, -1
        for block_id in islice(block_ids, cache_use.shared):
            if self._shares[block_id] != shares:
                shares = self._shares[block_id]
                shared = self._leave_chain(cache_use, SHARED, shares, cache_use.shared)
            self._chains[block_id] = shared
        for block_id in islice(block_ids, cache_use.shared, None):
            self._chains[block_id] = own
        for names, name in ((self._sessions, cache_use.session), (self._requests, cache_use.request_id)):
            if name:
                names[name] = own
                names.move_to_end(name)
                if len(names) > SESSIONS:
                    names.popitem(last=False)

    def evict_first(self, block_ids: Sequence[int]) -> None:
        """Evict blocks that a running request gives up before all others; blocks given up in one second go together."""
        now = self._clock()
        if now > self._given_up.at + RANK_S:
            self._given_up = IdleChain("", CLOSED, self._given_up.rates, now, closed=True)
        for block_id in block_ids:
            self._chains[block_id] = self._given_up

    def pause(self, request_id: str, reason: Pause, tools: int = 0) -> None:
        """Record why the session of a request that ended pauses, and the group of the tools that it runs.

        Ignored if the request is not remembered."""
        chain = self._requests.pop(request_id, None)
        if chain is not None:
            chain.settle(self._clock())
            self._aged.remove(chain)
            chain.rates = self._rates(chain.tenant, PAUSED, chain.turns + 1, reason + chain.retention, tools)
            self._enter(chain)

    def close(self, session: str) -> None:
        """Evict first the blocks that only this session used; ignored if it is not remembered."""
        chain = self._sessions.pop(session, None)
        if chain is not None:
            self._aged.remove(chain)
            self.stats.paused -= chain.idle > 0
            chain.kind, chain.closed = CLOSED, True
            self._enter(chain)

    # Blocks.

    def put(self, block_id: int, *, leaf: bool) -> None:
        """Add a block that has no user left. leaf: it has no children."""
        chain = self._chains[block_id]
        if chain is None:
            chain = self._chains[block_id] = self._copy()
        if not chain.idle + chain.dropped:
            chain.since = max(chain.since, self._clock())
            self._aged.watch(chain)
        self._idle.add(block_id)
        chain.idle += 1
        self.stats.paused += chain.idle == 1 and chain.kind == PAUSED
        if leaf:
            self.became_leaf(block_id)

    def became_leaf(self, block_id: int) -> None:
        """Note that the block has no children any more; ignored if it is not idle."""
        chain = self._chains[block_id]
        if block_id in self._idle and chain is not None:
            chain.leaves[block_id] = None
            self._aged.add(chain)

    def remove(self, block_id: int) -> None:
        """Remove a block that is used again, or whose content is wrong; ignored if it was not idle."""
        chain = self._chains[block_id]
        if block_id in self._idle and chain is not None:
            self._idle.discard(block_id)
            chain.idle -= 1
            self.stats.paused -= not chain.idle and chain.kind == PAUSED
            chain.leaves.pop(block_id, None)
            if not chain.leaves:
                self._aged.remove(chain)

    def pop(self) -> int:
        """Return the block to evict, which is idle no longer. Raises KeyError if none is idle."""
        self._tick()
        block_id = next(reversed(self._aged.cheapest().leaves))
        self.remove(block_id)
        return block_id

    def forget(self, block_id: int, block_hash: bytes, *, evicted: bool) -> None:
        """Note that a block has lost its content; if it was evicted, its return is still noticed for a while."""
        self.remove(block_id)
        chain, self._chains[block_id], self._shares[block_id] = self._chains[block_id], None, 0
        if chain is None or not evicted:
            return
        self.stats.evicted[chain.kind] += 1
        if chain.rates is self._given_up.rates:
            return
        if (older := self._remembered.pop(block_hash, None)) is not None:
            older.lost(self._clock())
        self._remembered[block_hash] = chain
        chain.dropped += 1
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)[1].lost(self._clock())

    def check(self, block_id: int, *, leaf: bool) -> None:
        """Assert that the block may be evicted if and only if it is idle and a leaf."""
        chain = self._chains[block_id]
        queued = chain is not None and chain.queued and block_id in chain.leaves
        assert queued == (leaf and block_id in self._idle), f"block {block_id} is stuck"

    def _returned_late(self, now: float, hashes: Sequence[bytes]) -> Iterator[IdleChain]:
        """Count evicted blocks that are needed again, and yield the chain of each."""
        for block_hash in hashes:
            chain = self._remembered.pop(block_hash, None)
            if chain is None:
                return
            chain.returned(now, 1)
            chain.dropped -= 1
            yield chain

    def _leave_chain(self, cache_use: CacheUse, kind: str, times: int, blocks: int) -> IdleChain:
        """Return a chain of the class for the blocks that a request left; `blocks` of them weigh as one chain."""
        detail, tools = (cache_use.pause + cache_use.retention, cache_use.tools) if kind == PAUSED else ("", 0)
        rates = self._rates(cache_use.tenant, kind, times, detail, tools)
        return IdleChain(
            cache_use.tenant, kind, rates, self._clock(), 1 / max(1, blocks), cache_use.prompt, cache_use.shared,
            cache_use.turns, cache_use.retention,
        )  # fmt: skip

    def _rates(self, tenant: str, kind: str, times: int, detail: str = "", tools: int = 0) -> ReturnRates:
        """Return the rates of a class: kind, what else is known, and a level of prompts or shares.

        Known tools replace prompts. A first prompt counts if it is named, calls tools, or has a known beginning."""
        level = 0 if tools else turn_level(times) if kind == PAUSED else min(MAX_LEVEL, times.bit_length())
        return self._classes.find(tenant, kind + detail, level, tools, alike=kind == PAUSED and not tools)

    def _copy(self) -> IdleChain:
        """Return the chain for blocks that no request has used; those of one second share it."""
        now = self._clock()
        if now > self._copied.at + RANK_S:
            self._copied = IdleChain("", COPIED, self._rates("", COPIED, 0), now)
        return self._copied

    def _enter(self, chain: IdleChain) -> None:
        if chain.leaves:
            self._aged.add(chain)

    def _tick(self) -> float:
        """Let chains age, and return the time."""
        now = self._clock()
        self._aged.age(now)
        if now > self._ranked + RANK_S:
            self._ranked = now
            self._aged.rank()
        return now
