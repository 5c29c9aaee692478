"""`simulated`: runs one routing policy on one trace; the standard workloads with their rates, and the policies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.choices import check_known
from kvferry.simulate.fleet import Shape
from kvferry.simulate.kvferry_policy import KvferryPolicy
from kvferry.simulate.peer_policies import OTHERS
from kvferry.simulate.policy import Policy
from kvferry.simulate.progress import SimulationProgress
from kvferry.simulate.results import Figures, Goal, figures, media_figures
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams
from kvferry.simulate.workloads import WORKLOADS
from kvferry.simulate.world import Loss, World

OURS = "kvferry"
POLICIES: Mapping[str, Callable[[], Policy]] = {OURS: KvferryPolicy, **OTHERS}
MAX_S = 7 * 24 * 3600
"""Longest time span of a trace's arrivals that is simulated, in seconds: a week."""
LOSSES = 4
"""Nodes lost in a trace with losses, one after the other, alternating between roles."""


@dataclass(frozen=True, slots=True)
class Case:
    """Workload at a request rate that 8 prefill and 8 decode nodes of the default machine can just serve.

    losses: nodes lost during the trace."""

    workload: str
    rate: float
    losses: int = 0


CASES: Mapping[str, Case] = {
    "low-sharing": Case("low-sharing", 34),
    "hot-prefix": Case("hot-prefix", 75),
    "many-prefixes": Case("many-prefixes", 22),
    "chat": Case("chat", 120),
    "agents": Case("agents", 70),
    "tool-agents": Case("tool-agents", 24),
    "several-tools": Case("several-tools", 24),
    "bursts": Case("bursts", 32),
    "documents": Case("documents", 1.3),
    "pictures": Case("pictures", 60),
    "recordings": Case("recordings", 160),
    "batch-rows": Case("batch-rows", 34),
    "mixed-models": Case("mixed-models", 60),
    "node-loss": Case("chat", 120, LOSSES),
}


def simulated(
    name: str,
    shape: Shape,
    trace: Sequence[TraceRequest],
    goal: Goal,
    losses: Sequence[Loss] = (),
    pace: SimulationProgress | None = None,
    *,
    targets: bool = False,
) -> Figures:
    """Simulate one policy on one trace and return the results.

    targets: kvferry rejects requests that would miss the goal.
    Raises ConfigError for an unknown policy, a request that fits on no node, or arrivals over more than MAX_S."""
    check_known("policy", name, POLICIES)
    check_fits(trace, shape)
    check_span(trace)
    policy = KvferryPolicy(targets=goal) if targets and name == OURS else POLICIES[name]()
    world = World(shape, policy, trace, losses, pace)
    began = time.perf_counter()
    with _quiet_routers():
        asyncio.run(world.play())
    found = figures(name, world.runs, list(world.fleet.nodes.values()), goal, world.clock.now)
    media = media_figures(list(world.fleet.encoders.values()), world.clock.now)
    return replace(found, real_s=time.perf_counter() - began, media=media)


@contextmanager
def _quiet_routers() -> Iterator[None]:
    """Suppress the router's warnings, which report every lost node."""
    log = logging.getLogger("kvferry.router")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def check_fits(trace: Sequence[TraceRequest], shape: Shape) -> None:
    """Raise ConfigError where a request of the trace fits no node."""
    for ask in trace:
        needed = shape.machine.blocks_for(ask.prompt_len + ask.output_len)
        if needed > shape.machine.blocks:
            raise ConfigError(
                f"request {ask.number} needs {needed} KV blocks and a node has {shape.machine.blocks}", param="blocks"
            )
        if ask.model not in shape.models:
            raise ConfigError(
                f"request {ask.number} asks for the model {ask.model!r}, which no node serves", param="models"
            )


def check_span(trace: Sequence[TraceRequest], param: str = "load") -> None:
    """Raise ConfigError for the setting `param` if arrivals span more than MAX_S.

    Leases are renewed all the time, so a long span is slow to simulate even if few requests arrive."""
    last_s = max(ask.at for ask in trace)
    if last_s > MAX_S:
        raise ConfigError(
            f"{len(trace)} requests arrive over {last_s:.3g} s; at most {MAX_S} s can be simulated", param=param
        )


def losses_of(count: int, trace: Sequence[TraceRequest], rate: float) -> list[Loss]:
    """Return `count` losses of nodes, spread over the time in which the trace's requests arrive."""
    span_s = len(trace) / rate
    roles = ("prefill", "decode")
    return [Loss((i + 1) * span_s / (count + 1), roles[i % 2], (0.37 * i) % 1) for i in range(count)]


def case(name: str, params: TraceParams) -> tuple[list[TraceRequest], list[Loss], tuple[str, ...]]:
    """Return a case's trace, losses and models. Raises ConfigError.

    params: its rate is a multiple of the case's usual rate."""
    check_known("workload", name, CASES)
    which = CASES[name]
    given = replace(params, rate=which.rate * params.rate)
    trace = WORKLOADS[which.workload](given)
    return trace, losses_of(which.losses, trace, given.rate), tuple(sorted({ask.model for ask in trace}))
