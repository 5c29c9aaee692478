"""A cluster whose streams compute drafts gives the text of an engine that computes none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_cluster import MODEL, LocalCluster, local_cluster, scrape, value

from engine.engine import Engine
from engine.events import Generated
from kernels.cpu import instruction_sets
from node.assembly import assemble
from protocol.messages import Job
from protocol.sampling import SamplingParams
from protocol.settings import RouterSettings, WorkerSettings
from protocol.work import Generate
from router.text.load import load_text_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension"),
]

TEXT = "The ferry left at seven with nine carts, two of them empty, and came back at eight with the mail.\n"
PROMPT = f"Text:\n{TEXT}The same text:\n{TEXT}The same text:\n"
TEMPERATURES = (0.0, 0.7)
OUTPUT = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    flags = ("--batch-invariant", "--dtype", "bfloat16", "--local-prefill-tokens", "0", "--kv-cache-gib", "0.2")
    with local_cluster(*flags, "--num-speculative-tokens", "8") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def engine() -> Engine:
    return assemble(WorkerSettings(batch_invariant=True, dtype="bfloat16", kv_cache_gib=0.2)).engine


def plain(engine: Engine, temperature: float) -> list[int]:
    prompt = load_text_model(RouterSettings()).encode(PROMPT)
    params = SamplingParams(max_tokens=OUTPUT, temperature=temperature, seed=7, ignore_eos=True)
    engine.events.clear()
    engine.add(Job(f"{temperature}", 0, tuple(prompt), len(prompt), Generate(params), "router"))
    while engine.has_work():
        engine.step()
    return [token for event in engine.events if isinstance(event, Generated) for token in event.delta.token_ids]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_text_is_the_same_in_fewer_steps(cluster: LocalCluster, engine: Engine, temperature: float) -> None:
    made = cluster.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=OUTPUT,
        temperature=temperature,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens = [token for chunk in made for choice in chunk.choices for token in choice.token_ids]  # type: ignore[attr-defined]
    assert tokens == plain(engine, temperature)
    cluster.settle()


def test_drafts_were_right_and_are_counted(cluster: LocalCluster) -> None:
    (decode,) = cluster.worker_urls("decode")
    samples = scrape(decode)
    accepted = value(samples, "kvferry_spec_decode_accepted_tokens_total")
    assert 0 < accepted <= value(samples, "kvferry_spec_decode_draft_tokens_total")
    assert value(samples, "kvferry_step_tokens_total", phase="decode") >= OUTPUT * len(TEMPERATURES) - 2
