"""Ablations: runs `kvferry` with its cache eviction or prefix waiting replaced, to measure the benefit.

    python -m benchmarks.altered_nodes slru serve --prefill 0 --decode 1 --kv-cache-gib 0.1
    python -m benchmarks.sessions agents

own    nothing is replaced
lru    a full pool evicts idle blocks in the order of their last use
slru   segmented LRU, which evicts reused blocks last: the engine's former policy
apart  prompts with a common prefix do not wait for the request that computes it"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from kvferry.cli import main as command
from kvferry.cli import serve
from kvferry.engine import block_pool, scheduler
from kvferry.engine.block_interfaces import EvictionOrder
from kvferry.simulate.segmented_lru import PROTECTED, SegmentedLru


def _lru(num_blocks: int) -> EvictionOrder:
    return SegmentedLru(0)


def _slru(num_blocks: int) -> EvictionOrder:
    return SegmentedLru(num_blocks // PROTECTED)


def _never(*_: object) -> bool:
    return False


_REPLACED: Mapping[str, tuple[object, str, object] | None] = {
    "own": None,
    "lru": (block_pool, "ValueEviction", _lru),
    "slru": (block_pool, "ValueEviction", _slru),
    "apart": (scheduler, "coming", _never),
}


def _program(name: str, subcommand: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.altered_nodes", name, subcommand]


def main() -> None:
    """Run a command of kvferry whose nodes have this mechanism replaced."""
    name = sys.argv.pop(1)
    if name not in _REPLACED:
        sys.exit(f"the mechanism must be one of {', '.join(_REPLACED)}; got {name!r}")
    if (replaced := _REPLACED[name]) is not None:
        setattr(*replaced)
    setattr(serve, "serve_cluster", partial(serve.serve_cluster, program=partial(_program, name)))  # noqa: B010
    command.main()


if __name__ == "__main__":
    main()
