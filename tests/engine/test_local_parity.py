"""One engine gives transformers' own float32 tokens: at once, chunked otherwise, cached, preempted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.engine.engine import Engine
from tests.cluster.local_tokens import GREEDY, SAMPLED, SOME, check, make_engine, run, sampled_locally
from tests.cluster.oracle import LENGTHS
from tests.short_form import is_short

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


OFTEN = 6 if is_short() else 12
"""Preemptions: each has a prompt computed again, in other chunks and beside others."""
CHUNKED = len(LENGTHS) - 2 * is_short()
"""Prompts, the shortest first. The short form leaves the two longest out: four chunks are as good as twelve, and what
so long a context computes is compared in the other test."""


def preempting(engine: Engine) -> Callable[[int], None]:
    def sometimes(step: int) -> None:
        running = engine.request_table.running
        if step % 7 == 0 and running and engine.scheduler.preempted_total < OFTEN:
            engine.scheduler.preempt(running[step % len(running)])

    return sometimes


def test_local_cached_and_sampled_tokens() -> None:
    engine = make_engine(512)
    check(run(engine, GREEDY), "local")
    hits = engine.pool.cached_blocks
    check(run(engine, GREEDY), "cached")
    assert hits > 200
    assert run(engine, SAMPLED, count=SOME) == sampled_locally(), "sampled text differs when the prompt is cached"
    other = make_engine(37, caching=False)
    made = run(other, SAMPLED, preempting(other), count=SOME)
    assert made == sampled_locally(), "sampled text differs by chunks and preemption"
    assert other.scheduler.preempted_total > 0


def test_other_chunks_with_preemption() -> None:
    engine = make_engine(101, caching=False)
    check(run(engine, GREEDY, preempting(engine), count=CHUNKED), "preempted, in chunks of 101")
    assert engine.scheduler.preempted_total > 5
