"""Synthetic workloads: seeded generators of request traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import HASH_BYTES
from kvferry.simulate.scenario import Scenario

Piece = tuple[str, int]
"""Piece of text: an identifier of its content, and its length in tokens."""


def hashes_of(pieces: Sequence[Piece], block_size: int) -> tuple[bytes, ...]:
    """Return the hashes of the full blocks of consecutive pieces."""
    found: list[bytes] = []
    parent, part, room = b"", "", block_size
    for name, tokens in pieces:
        at = 0
        while tokens - at >= room:
            part += f"{name}:{at}+{room};"
            at += room
            parent = blake2b(parent + part.encode(), digest_size=HASH_BYTES).digest()
            found.append(parent)
            part, room = "", block_size
        if at < tokens:
            part += f"{name}:{at}+{tokens - at};"
            room -= tokens - at
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Asked:
    """Parameters of a workload: number of requests, arrivals per second, seed and block size. Raises ConfigError."""

    count: int
    rate: float
    seed: int = 0
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.count < 1 or not self.rate > 0:
            raise ConfigError("a trace needs at least one request and a rate above 0", param="rate")


class Writer:
    """Collects a trace, with random times and lengths."""

    def __init__(self, asked: Asked, name: str) -> None:
        self.asked, self.rng = asked, random.Random(f"{asked.seed}/{name}")
        self.trace: list[Scenario] = []

    @property
    def full(self) -> bool:
        """Return whether the trace has all requests."""
        return len(self.trace) >= self.asked.count

    def times(self, rate: float) -> Iterator[float]:
        """Yield random arrival times in seconds, as a Poisson process."""
        now = 0.0
        while True:
            now += self.rng.expovariate(rate)
            yield now

    def length(self, median: int, spread: float = 0.6, least: int = 8) -> int:
        """Draw a log-normal text length."""
        return max(least, int(self.rng.lognormvariate(0.0, spread) * median))

    def ask(
        self, at: float, prompt: Sequence[Piece], output: int, *, after: int = -1, session: str = "",
        calls_tool: bool = False,
    ) -> Piece:  # fmt: skip
        """Add a request and return its output as a piece."""
        number = len(self.trace)
        said = (f"out{number}", output)
        hashes = hashes_of([*prompt, said], self.asked.block_size)
        length = sum(tokens for _, tokens in prompt)
        name = session or f"s{number}"
        self.trace.append(Scenario(number, at, length, output, hashes, after, name, calls_tool=calls_tool))
        return said

    def talk(self, at: float, context: list[Piece], turns: int, said: int, output: int, pause_s: float) -> None:
        """Add a conversation whose client waits for each answer, then for `pause_s` on average."""
        session, after = f"s{len(self.trace)}", -1
        for turn in range(turns):
            context.append((f"{session}t{turn}", self.length(said)))
            number = len(self.trace)
            answer = self.ask(at, context, self.length(output, least=4), after=after, session=session)
            context.append(answer)
            at, after = self.rng.expovariate(1 / pause_s), number


def low_sharing(asked: Asked) -> list[Scenario]:
    """Return a trace of prompts that share no prefix."""
    writer = Writer(asked, "low")
    for at in writer.times(asked.rate):
        if writer.full:
            return writer.trace
        writer.ask(at, [(f"p{len(writer.trace)}", writer.length(1500))], writer.length(200))
    return writer.trace


def hot_prefix(asked: Asked) -> list[Scenario]:
    """Return a trace in which all prompts share one long system prompt."""
    writer = Writer(asked, "hot")
    for at in writer.times(asked.rate):
        if writer.full:
            return writer.trace
        writer.ask(at, [("system", 6000), (f"p{len(writer.trace)}", writer.length(400))], writer.length(150))
    return writer.trace


def many_prefixes(asked: Asked) -> list[Scenario]:
    """Return a trace with hundreds of long prefixes of different popularity, more than a node can hold."""
    writer = Writer(asked, "many")
    names = range(400)
    weights = [1 / (1 + name) ** 0.6 for name in names]
    for at in writer.times(asked.rate):
        if writer.full:
            return writer.trace
        (name,) = writer.rng.choices(names, weights)
        writer.ask(at, [(f"x{name}", 6016), (f"p{len(writer.trace)}", writer.length(300))], writer.length(100))
    return writer.trace


def chat(asked: Asked) -> list[Scenario]:
    """Return a trace of conversations of several turns, from a few applications."""
    return _talks(asked, "chat", turns=8, first=(10, 3000), said=1500, output=250, pause_s=5.0)


def agents(asked: Asked) -> list[Scenario]:
    """Return a trace of tool-call loops: long tool results, short outputs, short pauses."""
    return _talks(asked, "agents", turns=15, first=(20, 4000), said=700, output=80, pause_s=1.5)


def _talks(
    asked: Asked, name: str, *, turns: int, first: tuple[int, int], said: int, output: int, pause_s: float
) -> list[Scenario]:
    writer = Writer(asked, name)
    for at in writer.times(asked.rate / turns):
        if writer.full:
            break
        system = (f"app{writer.rng.randrange(first[0])}", first[1])
        writer.talk(at, [system], writer.rng.randint(turns // 2, turns + turns // 2), said, output, pause_s)
    return writer.trace


def tool_agents(asked: Asked) -> list[Scenario]:
    """Return a trace of agents of 12 applications, whose tools take 1 to 60 s, beside requests that come once.

    A task takes 4 to 20 tool calls and ends with an answer; two of five users then go on, after 90 s on average. Three
    of ten requests are not part of a task."""
    writer = Writer(asked, "tool-agents")
    once, tasks = asked.count * 3 // 10, asked.rate * 0.7 / 20
    for at in writer.times(tasks):
        if len(writer.trace) >= asked.count - once:
            break
        _agent(writer, at)
    last = max(ask.at for ask in writer.trace if ask.after < 0)
    for _ in range(once):
        prompt = (f"once{len(writer.trace)}", writer.length(2500))
        writer.ask(writer.rng.random() * last, [prompt], writer.length(200))
    return writer.trace


def _agent(writer: Writer, at: float) -> None:
    rng, session, after, app = writer.rng, f"s{len(writer.trace)}", -1, writer.rng.randrange(12)
    context = [(f"app{app}", 3000 + 500 * app), (f"{session}task", writer.length(600))]
    while True:
        for _ in range(rng.randint(4, 20)):
            number = len(writer.trace)
            call = writer.ask(at, context, writer.length(90), after=after, session=session, calls_tool=True)
            context += [call, (f"{session}result{number}", writer.length(700))]
            after, at = number, min(60.0, max(1.0, rng.lognormvariate(1.6, 1.0)))
        number = len(writer.trace)
        answer = writer.ask(at, context, writer.length(250), after=after, session=session)
        if rng.random() < 0.6:
            return
        context += [answer, (f"{session}more{number}", writer.length(80))]
        after, at = number, rng.expovariate(1 / 90)


def bursts(asked: Asked) -> list[Scenario]:
    """Return a trace in which two of ten seconds have six tenths of the requests; requests share prefixes."""
    writer = Writer(asked, "bursts")
    now = 0.0
    while not writer.full:
        now += writer.rng.expovariate(asked.rate * (3.0 if now % 10 < 2 else 0.5))
        prefix = f"b{writer.rng.randrange(30)}"
        writer.ask(now, [(prefix, 2048), (f"p{len(writer.trace)}", writer.length(800))], writer.length(150))
    return writer.trace


def documents(asked: Asked) -> list[Scenario]:
    """Return a trace of long documents, with a few questions about each within a minute."""
    writer = Writer(asked, "documents")
    questions = 4
    for at in writer.times(asked.rate / questions):
        if writer.full:
            break
        name, length = f"d{len(writer.trace)}", min(writer.length(24_000, 0.5), 80_000)
        for _ in range(questions):
            writer.ask(
                at, [(name, length), (f"q{len(writer.trace)}", writer.length(60))], writer.length(200), session=name
            )
            at += writer.rng.expovariate(1 / 15)
    return sorted(writer.trace, key=lambda ask: ask.at)


def mixed_models(asked: Asked) -> list[Scenario]:
    """Return a trace for two models on separate nodes: agents for one, unshared prompts for the other."""
    half = replace(asked, count=-(-asked.count // 2))
    first = agents(replace(half, rate=asked.rate * 0.7))
    others = [replace(ask, model="n") for ask in low_sharing(replace(half, rate=asked.rate * 0.3))]
    moved = len(first)
    return first + [replace(ask, number=ask.number + moved, session=f"n{ask.session}") for ask in others]


WORKLOADS: Mapping[str, Callable[[Asked], list[Scenario]]] = {
    "low-sharing": low_sharing,
    "hot-prefix": hot_prefix,
    "many-prefixes": many_prefixes,
    "chat": chat,
    "agents": agents,
    "tool-agents": tool_agents,
    "bursts": bursts,
    "documents": documents,
    "mixed-models": mixed_models,
}
