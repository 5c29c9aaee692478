"""Replays the load of `benchmarks.sessions agents` through one pool, without a node and with any number of seeds.

A run on a node takes minutes for one draw of prompts and pauses, and rounds differ by ten points. Here a draw takes a
second. Each request holds its blocks for SERVED_S. The oracle knows all future requests; `known distributions` knows
those from which pauses and numbers of turns are drawn.

    python -m benchmarks.agent_traces [--seconds 70] [--blocks 291] [--first 0] [--seeds 16] [--named]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from benchmarks.eviction import ORACLE, SLRU, Replay
from benchmarks.known_pauses import KNOWN, at_age, gittins
from benchmarks.sessions import (
    AGENTS,
    APPS,
    BLOCK_SIZE,
    ONCE,
    ONCE_S,
    OUTPUT,
    RESULT,
    SYSTEM,
    TURNS,
    pause_s,
    result_tokens,
    text,
    turns,
)
from kvferry.engine.cache_use import CacheUse
from kvferry.protocol.hashing import chain
from kvferry.simulate.trace_request import TraceRequest

SERVED_S = 0.3
"""Seconds from a request to its last token, while its blocks are held."""
PAUSES = 40_000
"""Number of pauses drawn for their true distribution."""
Sent = tuple[float, list[int], list[int], str, int]
"""Time in seconds, prompt, output, session and turn of a request; without a session it comes once."""


@dataclass(frozen=True, slots=True)
class AgentRequest(TraceRequest):
    """Request of an agent, or one that comes once. named: its client names the session. turn: from 1 on."""

    named: bool = False
    turn: int = 0

    @property
    def cache_use(self) -> CacheUse:
        """Return its use of a pool's cached blocks."""
        return CacheUse(session=self.session if self.named else "")


def agent_trace(seed: int, seconds: float, *, named: bool = False) -> list[AgentRequest]:
    """Return the requests of all agents, and prompts that come once, in order of time."""
    sent = list(_once(seed, seconds))
    for number in range(AGENTS):
        sent += _agent(seed, number, seconds)
    return [
        AgentRequest(
            number, at, len(prompt), len(output), tuple(chain(b"", [*prompt, *output], BLOCK_SIZE)), session=session,
            named=named, turn=turn,
        )
        for number, (at, prompt, output, session, turn) in enumerate(sorted(sent))
    ]  # fmt: skip


def _agent(seed: int, number: int, seconds: float) -> Iterator[Sent]:
    rng, task = random.Random(f"{seed} agent {number}"), 0
    system, now = text(random.Random(f"app {number % APPS}"), SYSTEM), rng.random() * 5
    while True:
        history = [*system, *text(rng, 2 * RESULT)]
        for turn in range(1, turns(rng) + 1):
            if now > seconds:
                return
            output = text(rng, OUTPUT)
            yield now, history, output, f"{number} {task}", turn
            history = [*history, *output, *text(rng, result_tokens(rng))]
            now += SERVED_S + pause_s(rng)
        task += 1


def _once(seed: int, seconds: float) -> Iterator[Sent]:
    rng, now = random.Random(f"{seed} once"), 0.0
    while now < seconds:
        yield now, text(rng, ONCE), text(rng, OUTPUT), "", 0
        now += rng.expovariate(1 / ONCE_S)


class AgentPauses:
    """True distributions of agents' pauses and of their tasks' turns. System prompts are always worth keeping."""

    shared = 1.0

    def __init__(self) -> None:
        rng = random.Random("pauses")
        samples = [pause_s(rng) for _ in range(PAUSES)]
        self._indices = {turn: gittins(samples, _goes_on(turn)) for turn in range(TURNS[0] - 1, TURNS[1])}

    def value(self, ask: TraceRequest, idle_s: float) -> float:
        """Return the Gittins index of the request's session after a pause."""
        turn = ask.turn if isinstance(ask, AgentRequest) else 0
        indices = self._indices.get(max(turn, TURNS[0] - 1))
        return at_age(indices, idle_s) if indices and turn else 0.0


def _goes_on(turn: int) -> float:
    """Return the chance that a task has another turn."""
    least, most = TURNS
    return 1.0 if turn < least else (most - turn) / (most + 1 - turn)


def found(order: str, blocks: int, trace: list[AgentRequest], pauses: AgentPauses | None = None) -> float:
    """Return the share of agents' prompt tokens found; prompts that come once find nothing."""
    return Replay(order, blocks, trace, BLOCK_SIZE, pauses).found / sum(ask.prompt_len for ask in trace if ask.session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--blocks", type=int, default=291)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--named", action="store_true")
    options = parser.parse_args()
    traces = [
        agent_trace(seed, options.seconds, named=options.named)
        for seed in range(options.first, options.first + options.seeds)
    ]
    rates = {order: [found(order, options.blocks, each) for each in traces] for order in ("lru", SLRU, "value", ORACLE)}
    pauses = AgentPauses()
    rates[KNOWN] = [found(KNOWN, options.blocks, each, pauses) for each in traces]
    low, high = mean(rates[SLRU]), mean(rates[ORACLE])
    for order, shares in rates.items():
        shown = f"{100 * mean(shares):.1f} % ({100 * min(shares):.0f} … {100 * max(shares):.0f})"
        print(f"{order}: {shown}, way {100 * (mean(shares) - low) / (high - low):.0f} %")


if __name__ == "__main__":
    main()
