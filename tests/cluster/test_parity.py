"""Every path gives transformers' own float32 tokens: local, chunked otherwise, cached, preempted, shipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.worker.engine_factory import assemble
from tests.cluster.oracle import LENGTHS, NEW_TOKENS, answers, prompts
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SOME = 8
"""Of the prompts, the shortest, whose continuations are sampled, too."""
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, seed=1234, ignore_eos=True)


def make_engine(budget: int, *, caching: bool = True, blocks: int = 1200) -> Engine:
    settings = WorkerSettings(
        dtype="float32",
        max_num_batched_tokens=budget,
        max_prefill_tokens_while_decoding=budget,
        max_num_seqs=min(8, budget),
        enable_prefix_caching=caching,
        kv_blocks=blocks,
    )
    return assemble(settings).engine


def run(
    engine: Engine,
    params: SamplingParams,
    each_step: Callable[[int], None] = lambda step: None,
    count: int = len(LENGTHS),
) -> list[list[int]]:
    for i, prompt in enumerate(prompts()[:count]):
        engine.add(Job(f"r{i}", 0, prompt, len(prompt), Generate(params), "router"))
    step = 0
    while engine.has_work():
        assert engine.step()
        step += 1
        each_step(step)
    made: dict[str, list[int]] = defaultdict(list)
    for event in engine.events:
        if isinstance(event, Generated):
            made[event.key[0]] += event.delta.token_ids
    engine.events.clear()
    engine.check_integrity()
    return [made[f"r{i}"] for i in range(count)]


def preempting(engine: Engine) -> Callable[[int], None]:
    def sometimes(step: int) -> None:
        running = engine.request_table.running
        if step % 13 == 0 and running and step < 300:
            engine.scheduler.preempt(running[step % len(running)])

    return sometimes


def check(made: list[list[int]], path: str) -> None:
    for answer, tokens in zip(answers(), made, strict=True):
        answer.check(tokens, path)


@cache
def sampled_locally() -> list[list[int]]:
    """Sampled continuations of the first prompts, nothing cached."""
    return run(make_engine(512), SAMPLED, count=SOME)


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
    check(run(engine, GREEDY, preempting(engine)), "preempted, in chunks of 101")
    assert engine.scheduler.preempted_total > 5


@pytest.fixture(scope="module")
def float32_cluster() -> Iterator[LocalCluster]:
    with local_cluster("--dtype", "float32", "--kv-cache-gib", "1.2") as cluster:
        yield cluster


def test_disaggregated_tokens_over_ucx(float32_cluster: LocalCluster) -> None:
    client = float32_cluster.client

    def ask(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        made = client.completions.create(
            model=MODEL,
            prompt=list(prompt),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            extra_body={"top_k": params.top_k, "ignore_eos": True, "return_token_ids": True},
        )
        return list(made.choices[0].token_ids)  # type: ignore[attr-defined]

    with ThreadPoolExecutor(4) as pool:
        check(list(pool.map(lambda prompt: ask(prompt, GREEDY), prompts())), "disaggregated")
        assert list(pool.map(lambda prompt: ask(prompt, SAMPLED), prompts()[:SOME])) == sampled_locally()
    router = scrape(float32_cluster.url)
    assert value(router, "kvferry_placements_total", kind="remote") >= 15
    float32_cluster.settle()
