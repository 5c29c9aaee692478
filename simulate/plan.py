"""`kvferry plan`: number of nodes per role for a load, estimated by arithmetic and then checked by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.compare import OURS, check_span, simulated
from kvferry.simulate.fleet import Shape
from kvferry.simulate.machine import Machine
from kvferry.simulate.progress import SimulationProgress
from kvferry.simulate.results import Figures, Goal
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams, Writer

BUSY = 0.7
"""Share of its time that a prefill node computes in the first guess; beyond it queues grow."""
MAX_NODES = 4096
"""Maximum number of simulated nodes of each role."""
MAX_CHECKS = 24
"""Maximum number of simulations per plan."""
SHARED_PREFIXES = 4
"""Different shared prefixes in the trace."""


@dataclass(frozen=True, slots=True)
class Need:
    """Load to plan for. Raises ConfigError for a field out of bounds.

    rate: requests per second. prompt, output: mean tokens. reuse: share of a prompt's tokens that are a shared prefix.
    share: share of the requests that must meet the goal. image_tokens: mean tokens of a prompt's images. audio_s: mean
    seconds of a prompt's audio."""

    rate: float
    prompt: int
    output: int
    reuse: float = 0.0
    share: float = 0.99
    image_tokens: int = 0
    audio_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"rate must be above 0, not {self.rate}", param="rate")
        if not 0 <= self.reuse < 1:
            raise ConfigError(f"reuse must be from 0 to less than 1, not {self.reuse}", param="reuse")


def encoding(need: Need, machine: Machine, goal: Goal) -> tuple[int, Goal]:
    """Return the number of encode nodes, and the rest of the goal once a request's images and audio are encoded.

    Encode nodes are busy for BUSY of their time; a request waits for them as in a queue with random arrivals and equal
    service times (M/D/1, Pollaczek and Khinchine). Raises ConfigError if that alone takes longer than the goal."""
    tokens = need.image_tokens + need.audio_s * machine.audio_tokens_per_s
    if not tokens:
        return 0, goal
    encode_s = tokens / machine.media_tokens_per_s
    count = max(1, math.ceil(need.rate * encode_s / BUSY))
    load = need.rate * encode_s / count
    first_s = encode_s * (1 + load / (2 * (1 - load)))
    if first_s >= goal.ttft_s:
        raise ConfigError(
            f"the images and audio of one request take {first_s:.3g} s, the goal is {goal.ttft_s:.3g} s", param="ttft"
        )
    return count, replace(goal, ttft_s=goal.ttft_s - first_s)


def guess(need: Need, machine: Machine, goal: Goal) -> tuple[int, int]:
    """Estimate the number of (prefill, decode) nodes.

    Prefill nodes are busy for BUSY of their time. A decode node takes the number of streams that keeps a step within
    the goal and fits in its blocks. Raises ConfigError if a single request cannot meet the goal."""
    start = int(need.prompt * need.reuse)
    compute_s = machine.compute_s(start, need.prompt)
    allowed_s = goal.ttft_s + goal.ttft_ktoken_s * need.prompt / 1000
    if compute_s > allowed_s:
        raise ConfigError(
            f"one prompt takes {compute_s:.3g} s on an idle node, the goal is {allowed_s:.3g} s", param="ttft"
        )
    context = need.prompt + need.output / 2
    each_s = machine.stream_s + machine.context_s * context
    if machine.step_s + each_s > goal.itl_s:
        raise ConfigError(
            f"a single stream takes {machine.step_s + each_s:.3g} s per token, the goal is {goal.itl_s:.3g} s",
            param="itl",
        )
    by_step = (goal.itl_s - machine.step_s) / each_s if each_s else math.inf
    by_blocks = machine.blocks // machine.blocks_for(need.prompt + need.output)
    if by_blocks < 1:
        raise ConfigError("one request needs more KV blocks than a node has", param="blocks")
    streams = min(machine.max_num_seqs, by_blocks, by_step)
    prefill = need.rate * compute_s / BUSY
    step_s = machine.decode_s(int(streams), streams * context)
    decode = need.rate * need.output * step_s / streams
    if max(prefill, decode) > MAX_NODES:
        raise ConfigError(
            f"this needs about {prefill:.3g} prefill and {decode:.3g} decode nodes; {MAX_NODES} of each are simulated "
            "at most",
            param="rate",
        )
    return max(1, math.ceil(prefill)), max(1, math.ceil(decode))


def trace_of(need: Need, requests: int, seed: int, block_size: int) -> list[TraceRequest]:
    """Return requests at random times, with log-normal lengths around the needed means."""
    writer = Writer(TraceParams(requests, need.rate, seed, block_size), "plan")
    shrink = math.exp(-SPREAD * SPREAD / 2)
    for at in writer.times(need.rate):
        if writer.full:
            break
        number = len(writer.trace)
        length = writer.length(int(need.prompt * shrink) or 1, SPREAD, least=1)
        shared = int(length * need.reuse)
        name = f"shared{writer.rng.randrange(SHARED_PREFIXES)}"
        output = writer.length(int(need.output * shrink) or 1, SPREAD, least=1)
        writer.request(
            at, [(name, shared), (f"own{number}", length - shared)] if shared else [(f"own{number}", length)], output
        )
    return writer.trace


SPREAD = 0.4
"""Standard deviation of the logarithm of the lengths."""


def checks(
    need: Need, machine: Machine, goal: Goal, requests: int, seed: int, say: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[int, int, Figures]]:  # fmt: skip
    """Simulate fleets from the guess on and yield (prefill, decode, results); the last is the smallest that is enough.

    While the goal is missed, it adds nodes of the role whose half of the goal is missed by more. Then it removes nodes,
    one role after the other, while the goal is still met. say: called with progress. Raises ConfigError if no fleet is
    enough."""
    trace = trace_of(need, requests, seed, machine.block_size)
    check_span(trace, "rate")
    longest = max(machine.blocks_for(ask.prompt_len + ask.output_len) for ask in trace)
    if longest > machine.blocks:
        raise ConfigError(
            f"a prompt with its output needs {longest} KV blocks and a node has {machine.blocks}", param="blocks"
        )
    tried: dict[tuple[int, int], Figures] = {}

    def attempt(nodes: tuple[int, int]) -> Figures:
        if nodes not in tried:
            pace = SimulationProgress("{} prefill, {} decode".format(*nodes), len(trace), say)
            tried[nodes] = simulated(OURS, Shape(*nodes, machine), trace, goal, pace=pace)
        return tried[nodes]

    nodes = guess(need, machine, goal)
    while (found := attempt(nodes)).share < need.share:
        yield (*nodes, found)
        if len(tried) >= MAX_CHECKS or max(nodes) >= MAX_NODES:
            raise ConfigError(
                f"{nodes[0]} prefill and {nodes[1]} decode nodes are not enough: is the goal too strict?", param="share"
            )
        nodes = _more(nodes, found, goal)
    best = nodes
    yield (*best, found)
    for role in (0, 1):
        while best[role] > 1 and len(tried) < MAX_CHECKS:
            fewer = (best[0] - (role == 0) * _step(best[0]), best[1] - (role == 1) * _step(best[1]))
            found = attempt(fewer)
            yield (*fewer, found)
            if found.share < need.share:
                break
            best = fewer
    yield (*best, attempt(best))


def _more(nodes: tuple[int, int], found: Figures, goal: Goal) -> tuple[int, int]:
    late, slow = found.ttft_s[-1] / max(goal.ttft_s, 1e-9), found.itl_s[-1] / max(goal.itl_s, 1e-9)
    prefill, decode = nodes
    return (prefill, decode + _step(decode)) if slow > late else (prefill + _step(prefill), decode)


def _step(count: int) -> int:
    """Return the number of nodes to add or remove between two tries."""
    return max(1, count // 10)


def plan_command(
    machine: Machine,
    say: Callable[[str], None],
    *,
    rate: float,
    prompt: int,
    output: int,
    reuse: float,
    share: float,
    requests: int,
    seed: int,
    ttft: float,
    ttft_ktoken: float,
    itl: float,
    image_tokens: int = 0,
    audio_s: float = 0.0,
) -> int:
    """Run `kvferry plan` and print the result. Raises ConfigError."""
    need = Need(rate, prompt, output, reuse, share, image_tokens, audio_s)
    encode, goal = encoding(need, machine, Goal(ttft, ttft_ktoken, itl))
    if encode:
        say(f"{encode} encode nodes, which leave {goal.ttft_s:.3g} s for the prompt")
    say("first estimate: {} prefill and {} decode nodes".format(*guess(need, machine, goal)))
    found: tuple[int, int, Figures] | None = None
    for found in checks(need, machine, goal, requests, seed, say):
        prefill, decode, each = found
        first_s, between_ms = each.ttft_s[-1], 1000 * each.itl_s[-1]
        say(
            f"{prefill} prefill, {decode} decode: {each.share:.1%} meet the goal; TTFT p99 {first_s:.2f} s, "
            f"ITL p99 {between_ms:.0f} ms"
        )
    assert found is not None
    say(f"\n{found[0]} prefill and {found[1]} decode nodes" + (f", and {encode} encode nodes" if encode else ""))
    return 0
