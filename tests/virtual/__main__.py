"""`make simulate-protocol`: many seeds on all cores, what was wrong in each, and mistakes with seeds that find them.
Exit status 1 where anything was wrong, or a mistake was not found."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import click

from tests.virtual.finding import FOUND_BY, MUTANTS, RARE, finders
from tests.virtual.plan import make_plan
from tests.virtual.world import LEAST_DONE, World, share_done

AT_ONCE = 50


@click.command(context_settings={"show_default": True})
@click.option("--seeds", default=10_000)
@click.option("--first", default=0, help="the first of them")
@click.option("--mutant-seeds", default=200, help="in which each mistake must be found; 0: they are not tried")
@click.option("--workers", default=os.cpu_count() or 1)
def main(seeds: int, first: int, mutant_seeds: int, workers: int) -> None:
    began, outcomes, hours, wrong = time.time(), Counter[str](), 0.0, 0
    with ProcessPoolExecutor(workers) as pool:
        starts = range(first, first + seeds, AT_ONCE)
        for found, ended, seconds in pool.map(partial(some, first + seeds), starts):
            outcomes += ended
            hours += seconds / 3600
            wrong += len(found)
            for seed, what in found:
                click.echo("\n  ".join([f"seed {seed}:", *what]))
        click.echo(f"{seeds} schedules, {hours:.1f} virtual hours in {time.time() - began:.0f} s: {wrong} wrong")
        click.echo(", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common()))
        if share_done(outcomes) < LEAST_DONE:
            wrong += 1
            click.echo(f"only {share_done(outcomes):.1%} of those who stayed got all that they asked for")
        for name, seed in pool.map(partial(finder, mutant_seeds), MUTANTS if mutant_seeds else ()):
            wrong += seed is None and name not in RARE
            click.echo(f"{name}: {'not found' if seed is None else f'found by seed {seed}'}")
    sys.exit(bool(wrong))


def some(end: int, start: int) -> tuple[list[tuple[int, list[str]]], Counter[str], float]:
    """Seeds from `start`: those that were wrong, how clients fared, virtual seconds."""
    found, outcomes, seconds = [], Counter[str](), 0.0
    for seed in range(start, min(start + AT_ONCE, end)):
        world = World(make_plan(seed))
        if world.run():
            found.append((seed, world.wrong[:5]))
        outcomes += world.outcomes()
        seconds += world.loop.time()
    return found, outcomes, seconds


def finder(seeds: int, name: str) -> tuple[str, int | None]:
    return name, next(finders(name, [FOUND_BY.get(name, 0), *range(seeds)]), None)


if __name__ == "__main__":
    main()
