"""EncodePool: simulated encode nodes with embedding caches, chosen for a request's media by the router's own rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from kvferry.placement.encoders import Encoder, ranked
from kvferry.simulate.clock import Clock
from kvferry.simulate.machine import Machine
from kvferry.simulate.media_cache import MediaCache
from kvferry.simulate.node import Node, Run
from kvferry.simulate.trace_request import Medium


class EncodeNode:
    """Simulated encode node, which encodes in order of arrival. busy_s: seconds spent on it."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.key, self.machine, self.rows = (name, 1), machine, MediaCache(machine.media_cache_tokens)
        self.free_at, self.busy_s = 0.0, 0.0

    def seen(self, items: Sequence[Medium], now: float) -> Encoder:
        """Return what a router knows of this node for a request's media."""
        rate, size = self.machine.media_tokens_per_s, sum(item.length for item in items) * self.machine.media_row_bytes
        queued, missing = int(max(0.0, self.free_at - now) * rate), self.rows.missing(items)
        return Encoder(self.key, queued, missing, rate, size, self.machine.ship_bytes_per_s)

    def encode(self, items: Sequence[Medium], now: float) -> float:
        """Encode what is not kept, and return when it is done."""
        spent_s = self.rows.missing(items) / self.machine.media_tokens_per_s
        self.rows.keep(items)
        self.busy_s += spent_s
        if spent_s:
            self.free_at = max(now, self.free_at) + spent_s
        return self.free_at if spent_s else now


class EncodePool:
    """All encode nodes of one model; `count` may be 0.

    tokens: of media that were needed beyond cached prefixes. encoded: those that some node had to encode."""

    def __init__(self, model: str, count: int, machine: Machine, clock: Clock) -> None:
        self.nodes = [EncodeNode(f"{model}-encode-{number:04}", machine) for number in range(count)]
        self._machine, self._clock = machine, clock
        self._kept = defaultdict[tuple[str, int], MediaCache](lambda: MediaCache(machine.media_cache_tokens))
        """MediaCache of the nodes of prompts, by name and epoch."""
        self.tokens = self.encoded = 0

    def encode(self, run: Run, node: Node, done: Callable[[], None]) -> None:
        """Have the media encoded that a prompt needs on its node; `done` is called once the node can begin.

        Without an encode node that is worth it, the node encodes them itself as a part of the prompt."""
        if not run.ask.media:
            return done()
        key, whole = (node.name, node.epoch), (run.length - 1) // self._machine.block_size
        cached, kept = node.memory.found(run.ask.hashes[:whole]) * self._machine.block_size, self._kept[key]
        items = [item for item in run.ask.media if item.offset + item.length > cached]
        own = Encoder(key, 0, kept.missing(items), self._machine.media_tokens_per_s)
        self.tokens += sum(item.length for item in items)
        now, known = self._clock.now, {each.key: each for each in self.nodes}
        choices = ranked([each.seen(items, now) for each in self.nodes], own)
        kept.keep(items)
        run.encode_tokens = 0 if choices else own.missing
        self.encoded += choices[0].missing if choices else own.missing
        if not choices:
            return done()
        ready = known[choices[0].key].encode(items, now) + choices[0].bytes / self._machine.ship_bytes_per_s
        self._clock.at(ready, done)
