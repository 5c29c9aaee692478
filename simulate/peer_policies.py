"""Routing policies to compare with: round robin, least load, power of two, affinity, SGLang's and llm-d's.

They follow the published rules and weights. They are better informed than the originals: each sees the current queues
of all nodes, not scraped ones."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from kvferry.simulate.fleet import Fleet
from kvferry.simulate.node import Node, Run
from kvferry.simulate.policy import Choice


class Counting:
    """Base of the policies: counts this router's requests in flight at each node.

    Implements `simulate.policy.Policy`."""

    def __init__(self) -> None:
        self.load: Counter[Node] = Counter()
        self.rng = random.Random(0)

    def enter(self, fleet: Fleet) -> None:
        """Start with the fleet."""
        self.fleet = fleet

    async def choose(self, run: Run) -> Choice | None:
        """Choose a prefill and a decode node; None if a role has no live node."""
        prefills = self.fleet.of("prefill", run.ask.model)
        decodes = self.fleet.of("decode", run.ask.model)
        if not decodes or (self.fleet.shape.prefill and not prefills):
            return None
        return Choice(await self.pick(run, prefills) if prefills else None, await self.pick(run, decodes))

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Choose a node of one role."""
        raise NotImplementedError

    def launched(self, run: Run) -> None:
        """Count the request at both nodes."""
        self.load.update(self._nodes(run))

    def first_token(self, run: Run) -> None:
        """Ignored: the request counts until the prefill node has shipped."""

    def decoding(self, run: Run) -> None:
        """Stop counting the request at its prefill node."""
        if run.prefill is not None:
            self.load[run.prefill] -= 1

    def ended(self, run: Run) -> None:
        """Stop counting the request where it is still counted."""
        self.load.subtract(self._nodes(run) if run.first_s < 0 else self._nodes(run)[-1:])

    async def poll(self) -> None:
        """Ignored: these policies poll nothing."""

    def displaced(self) -> Sequence[Run]:
        """Return nothing: these policies displace no requests."""
        return ()

    def lost(self, node: Node) -> None:
        """Ignored: the fleet lists only live nodes."""

    def _nodes(self, run: Run) -> list[Node]:
        return [node for node in (run.prefill, run.decode) if node is not None]


class RoundRobin(Counting):
    """Sends requests to nodes in turn."""

    def enter(self, fleet: Fleet) -> None:
        """Start with the fleet and reset the turns."""
        super().enter(fleet)
        self._turns: Counter[tuple[str, str]] = Counter()

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return the next node in turn."""
        turn = (nodes[0].role, nodes[0].model)
        self._turns[turn] += 1
        return nodes[self._turns[turn] % len(nodes)]


class LeastLoad(Counting):
    """Sends each request to the node with the fewest requests in flight; ties are broken at random."""

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return the least loaded node."""
        return self.least(nodes)

    def least(self, nodes: Sequence[Node]) -> Node:
        """Return one of the least loaded nodes, at random."""
        least = min(self.load[node] for node in nodes)
        return self.rng.choice([node for node in nodes if self.load[node] == least])


class PowerOfTwo(LeastLoad):
    """Sends each request to the less loaded of two random nodes."""

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return the less loaded of two random nodes."""
        return self.least(self.rng.sample(nodes, min(2, len(nodes))))


class Affinity(Counting):
    """Maps each session to a node by consistent hashing, regardless of load."""

    POINTS = 100
    """Points of each node on the hash ring."""

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return the session's node on the hash ring."""
        ring = self._ring(tuple(nodes))
        at = bisect_right(ring, crc32(run.ask.session.encode()), key=lambda point: point[0])
        return ring[at % len(ring)][1]

    def _ring(self, nodes: tuple[Node, ...]) -> list[tuple[int, Node]]:
        rings: dict[tuple[Node, ...], list[tuple[int, Node]]] = self.__dict__.setdefault("_rings", {})
        if nodes not in rings:
            points = [(crc32(f"{node.name}/{point}".encode()), node) for node in nodes for point in range(self.POINTS)]
            rings[nodes] = sorted(points, key=lambda point: point[0])
        return rings[nodes]


class PrefixTree(LeastLoad):
    """SGLang's `cache_aware` policy.

    It picks the node whose approximate tree shares most of the prompt, if that is more than the share CACHE of it, and
    the least loaded node otherwise. It also picks the least loaded node while loads differ by more than both the
    ABSOLUTE and the RELATIVE threshold. Decode nodes are picked by power of two."""

    CACHE, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
    MOST = 1 << 18
    """Blocks that the tree remembers."""

    def __init__(self) -> None:
        super().__init__()
        self._tree: dict[bytes, dict[Node, None]] = {}

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return a node by shared prefix or load, and add the prompt to the node's tree."""
        if nodes[0].role == "decode" and self.fleet.shape.prefill:
            return self.least(self.rng.sample(nodes, min(2, len(nodes))))
        loads = [self.load[node] for node in nodes]
        uneven = max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads)
        hashes = run.ask.hashes[: run.length // nodes[0].machine.block_size]
        matched, node = self._matched(hashes, nodes)
        if uneven or node is None or matched <= self.CACHE * len(hashes):
            node = self.least(nodes)
        self._insert(hashes, node)
        return node

    def _matched(self, hashes: Sequence[bytes], nodes: Sequence[Node]) -> tuple[int, Node | None]:
        found: Node | None = None
        for length, block in enumerate(hashes):
            holders = [node for node in self._tree.get(block, ()) if node in nodes]
            if not holders:
                return length, found
            found = found if found in holders else holders[-1]
        return len(hashes), found

    def _insert(self, hashes: Sequence[bytes], node: Node) -> None:
        for block in hashes:
            holders = self._tree.pop(block, {})
            holders.pop(node, None)
            holders[node] = None
            self._tree[block] = holders
        while len(self._tree) > self.MOST:
            del self._tree[next(iter(self._tree))]


class Scorers(LeastLoad):
    """llm-d's scorers with their default weights; the node with the greatest sum is picked.

    Each scores from 0 to 1: cached prefix (by the real index, in blocks of the prompt), queue, and use of the pool."""

    WEIGHTS: Mapping[str, float] = {"prefix": 3.0, "queue": 2.0, "pool": 2.0}

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Return the node with the best weighted score; ties are broken at random."""
        hashes = run.ask.hashes[: run.length // nodes[0].machine.block_size]
        held = await self.fleet.store.longest_prefix(hashes, {node.name: node.epoch for node in nodes})
        queues = [node.num_waiting for node in nodes]
        least, most = min(queues), max(queues)
        weights = self.WEIGHTS

        def score(node: Node) -> float:
            queue = (most - node.num_waiting) / (most - least) if most > least else 1.0
            prefix = held.get(node.name, 0) / max(1, len(hashes))
            room = 1 - node.memory.holds.num_held / node.memory.num_blocks
            return weights["prefix"] * prefix + weights["queue"] * queue + weights["pool"] * room

        scores = [score(node) for node in nodes]
        best = max(scores)
        return self.rng.choice([node for node, each in zip(nodes, scores, strict=True) if each >= best - 1e-9])


OTHERS: Mapping[str, Callable[[], Counting]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "prefix-tree": PrefixTree,
    "scorers": Scorers,
    "affinity": Affinity,
}
