"""Routing policies of other routers, such as those of SGLang and llm-d, by their published rules and weights.

They know more than theirs do: each sees the queues of all nodes as they are, not as they were scraped.
"""

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
    """The base of all: requests under way at each node, by what this router sent."""

    def __init__(self) -> None:
        self.load: Counter[Node] = Counter()
        self.rng = random.Random(0)

    def enter(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def choose(self, run: Run) -> Choice | None:
        prefills = self.fleet.of("prefill", run.ask.model)
        decodes = self.fleet.of("decode", run.ask.model)
        if not decodes or (self.fleet.shape.prefill and not prefills):
            return None
        return Choice(await self.pick(run, prefills) if prefills else None, await self.pick(run, decodes))

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        """Choose a node of one role."""
        raise NotImplementedError

    def launched(self, run: Run) -> None:
        self.load.update(self._nodes(run))

    def first_token(self, run: Run) -> None:
        """Counted until the prefill node has shipped."""

    def decoding(self, run: Run) -> None:
        if run.prefill is not None:
            self.load[run.prefill] -= 1

    def ended(self, run: Run) -> None:
        self.load.subtract(self._nodes(run) if run.first_s < 0 else self._nodes(run)[-1:])

    async def poll(self) -> None:
        """They poll nothing."""

    def lost(self, node: Node) -> None:
        """A node that died is not among those that live."""

    def _nodes(self, run: Run) -> list[Node]:
        return [node for node in (run.prefill, run.decode) if node is not None]


class RoundRobin(Counting):
    """Sends requests to nodes in turn."""

    def enter(self, fleet: Fleet) -> None:
        super().enter(fleet)
        self._turns: Counter[tuple[str, str]] = Counter()

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        turn = (nodes[0].role, nodes[0].model)
        self._turns[turn] += 1
        return nodes[self._turns[turn] % len(nodes)]


class LeastLoad(Counting):
    """The fewest requests under way; of equals any."""

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        return self.least(nodes)

    def least(self, nodes: Sequence[Node]) -> Node:
        least = min(self.load[node] for node in nodes)
        return self.rng.choice([node for node in nodes if self.load[node] == least])


class PowerOfTwo(LeastLoad):
    """Sends each request to the less loaded of two random nodes."""

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        return self.least(self.rng.sample(nodes, min(2, len(nodes))))


class Affinity(Counting):
    """Consistent hashing of the session, whatever is loaded."""

    POINTS = 100

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
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
    """SGLang's `cache_aware`: the node whose approximate tree shares most of the prompt, if that is more than a share
    of it, else the least loaded; the least loaded, too, while loads differ by more than both thresholds. Decode nodes
    by power of two."""

    CACHE, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
    MOST = 1 << 18
    """Blocks that the tree remembers."""

    def __init__(self) -> None:
        super().__init__()
        self._tree: dict[bytes, dict[Node, None]] = {}

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
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
    """llm-d's: prefix (of the real index, in blocks of the prompt), queue and use of the pool, each from 0 to 1, by
    their default weights; the greatest sum is picked."""

    WEIGHTS: Mapping[str, float] = {"prefix": 3.0, "queue": 2.0, "pool": 2.0}

    async def pick(self, run: Run, nodes: Sequence[Node]) -> Node:
        hashes = run.ask.hashes[: run.length // nodes[0].machine.block_size]
        held = await self.fleet.store.longest_prefix(hashes, {node.name: node.epoch for node in nodes})
        queues = [node.asking for node in nodes]
        least, most = min(queues), max(queues)
        weights = self.WEIGHTS

        def score(node: Node) -> float:
            queue = (most - node.asking) / (most - least) if most > least else 1.0
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
