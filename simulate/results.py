"""Figures: results of a simulation (latency percentiles, goodput, hit rate, balance), and Goal, the latency goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median, quantiles

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.encoders import EncodePool
from kvferry.simulate.node import Node, Run

PERCENTILES = (50, 90, 99)
"""Percentiles of latencies that are reported."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Latency goal of a request. Raises ConfigError for a negative or infinite field.

    The first token must come within ttft_s plus ttft_ktoken_s per thousand prompt tokens, and tokens must be itl_s
    apart on average or less."""

    ttft_s: float = 1.0
    ttft_ktoken_s: float = 0.25
    itl_s: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ConfigError(f"{field.name} must be 0 or more, not {getattr(self, field.name)}", param=field.name)

    def met(self, run: Run) -> bool:
        """Return whether the run met the goal."""
        return not run.failed and run.ttft_s <= self.first_s(run) and run.itl_s <= self.itl_s

    def first_s(self, run: Run) -> float:
        """Return the seconds within which the first token must come."""
        return self.ttft_s + self.ttft_ktoken_s * run.ask.prompt_len / 1000


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one policy on one trace.

    Background requests count in `requests`, `hit_rate`, `imbalance` and `failed`.

    ttft_s, itl_s   percentiles (50, 90, 99) in seconds; a request's itl_s is the mean time between its tokens
    goodput         requests that met the goal, per second of arrivals
    share           share of all requests that met the goal
    hit_rate        share of prompt tokens that were reused where the prompt was computed
    imbalance       most seconds that a node spent on prompts, over the mean of the nodes that should
    failed          requests that fit on no node, and those rejected
    kept            share of the admitted requests that met the goal
    virtual_s, real_s   duration on the virtual clock and of the simulation itself
    media           of the trace's media; None: it has none"""

    policy: str
    requests: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    goodput: float
    share: float
    hit_rate: float
    imbalance: float
    failed: int
    virtual_s: float
    real_s: float = 0.0
    kept: float = 1.0
    media: MediaFigures | None = None


@dataclass(frozen=True, slots=True)
class MediaFigures:
    """Tokens of media beyond cached prefixes, those of them that were encoded, and how busy encode nodes were."""

    tokens: int
    encoded: int
    busy: float

    def __str__(self) -> str:
        """Return them as a sentence."""
        kept = 1 - self.encoded / max(1, self.tokens)
        found = f"{self.tokens} tokens of media needed, {kept:.0%} from caches of encodings"
        return f"{found}; encode nodes busy {self.busy:.0%}"


def media_figures(pools: Sequence[EncodePool], seconds: float) -> MediaFigures | None:
    """Return the results of all models' media; None if no prompt had any."""
    nodes = [node for pool in pools for node in pool.nodes]
    busy = sum(node.busy_s for node in nodes) / max(1e-9, len(nodes) * seconds)
    tokens = sum(pool.tokens for pool in pools)
    return MediaFigures(tokens, sum(pool.encoded for pool in pools), busy) if tokens else None


def figures(policy: str, runs: Sequence[Run], nodes: Sequence[Node], goal: Goal, virtual_s: float) -> Figures:
    """Return the results of at least one run; all runs must have ended."""
    done = [run for run in runs if not run.failed]
    awaited = [run for run in runs if not run.ask.background] or runs
    served = [run for run in awaited if not run.failed]
    first = _percentiles([run.ttft_s for run in served])
    between = _percentiles([run.itl_s for run in served if run.ask.output_len > 1])
    met = sum(map(goal.met, awaited))
    arrivals_s = max(run.arrived for run in runs) - min(run.arrived for run in runs)
    prompts = sum(run.ask.prompt_len for run in done)
    reused = sum(max(0, run.cached_len) for run in done)
    computing = [node.busy_s for node in nodes if node.role == "prefill"] or [node.busy_s for node in nodes]
    mean_s = sum(computing) / len(computing)
    return Figures(
        policy, len(runs), first, between, met / max(arrivals_s, 1e-9), met / len(awaited), reused / max(1, prompts),
        max(computing) / mean_s if mean_s else 1.0, len(runs) - len(done), virtual_s, kept=met / max(1, len(served)),
    )  # fmt: skip


def medians(found: Sequence[Figures]) -> Figures:
    """Return the medians over at least one seed, figure by figure."""
    return replace(
        found[0],
        ttft_s=tuple(map(median, zip(*(each.ttft_s for each in found), strict=True))),
        itl_s=tuple(map(median, zip(*(each.itl_s for each in found), strict=True))),
        **{name: median(getattr(each, name) for each in found) for name in SINGLE},
    )


SINGLE = ("goodput", "share", "hit_rate", "imbalance", "virtual_s", "real_s", "kept")
"""Fields of Figures that are single numbers."""


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    if not seconds:
        return tuple(0.0 for _ in PERCENTILES)
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [*seconds] * 99
    return tuple(cuts[each - 1] for each in PERCENTILES)
