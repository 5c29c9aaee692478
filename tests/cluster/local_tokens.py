"""The demo model's greedy and sampled tokens, computed by one engine of this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.worker.engine_factory import assemble
from tests.cluster.oracle import LENGTHS, NEW_TOKENS, answers, prompts
from tests.once_a_run import once_a_run

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SOME = 8
"""Of the prompts, the shortest, whose continuations are sampled, too."""
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, seed=1234, ignore_eos=True)

DAY_S = 86_400.0
"""Deadline of a request: at idle priority it may take longer than a client would wait."""


def make_engine(budget: int, *, caching: bool = True, blocks: int = 1200) -> Engine:
    """On one thread: where others want the cores, several threads mostly wait for each other, and spin as they do."""
    settings = WorkerSettings(
        dtype="float32",
        threads=1,
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
        engine.add(Job(f"r{i}", 0, prompt, len(prompt), Generate(params), "router", deadline_s=DAY_S))
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


def check(made: list[list[int]], path: str) -> None:
    """Compare the continuations of the first prompts, in order."""
    for answer, tokens in zip(answers()[: len(made)], made, strict=True):
        answer.check(tokens, path)


@cache
def sampled_locally() -> list[list[int]]:
    """Sampled continuations of the first prompts, nothing cached."""
    made: list[list[int]] = once_a_run("sampled_locally", lambda: run(make_engine(512), SAMPLED, count=SOME))
    return made
