"""A cluster whose streams compute drafts gives the text of an engine that computes none, anyone who drafts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.kernels.cpu import instruction_sets
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings, WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.router.text.loader import load_text_model
from kvferry.worker.engine_factory import assemble
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension"),
]

TEXT = "The ferry left at seven with nine carts, two of them empty, and came back at eight with the mail.\n"
PROMPT = f"Text:\n{TEXT}The same text:\n{TEXT}The same text:\n"
TEMPERATURES = (0.0, 0.7)
OUTPUT = 60
FREE = "Write a tale of a lighthouse.\n\nOnce"


@pytest.fixture(scope="module", params=[(), ("--speculative-model", "smollm2")], ids=["lookup", "model"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Or with a draft model, which is the model itself: its drafts are right, and as dear as tokens."""
    flags = ("--batch-invariant", "--dtype", "bfloat16", "--local-prefill-tokens", "0", "--kv-cache-gib", "0.2")
    with local_cluster(*flags, "--num-speculative-tokens", "8", *request.param) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def engine() -> Engine:
    return assemble(WorkerSettings(batch_invariant=True, dtype="bfloat16", kv_cache_gib=0.2)).engine


def plain(engine: Engine, text: str, temperature: float) -> list[int]:
    prompt = load_text_model(RouterSettings()).encode(text)
    params = SamplingParams(max_tokens=OUTPUT, temperature=temperature, seed=7, ignore_eos=True)
    engine.events.clear()
    engine.add(Job(f"{text}{temperature}", 0, tuple(prompt), len(prompt), Generate(params), "router"))
    while engine.has_work():
        engine.step()
    return [token for event in engine.events if isinstance(event, Generated) for token in event.delta.token_ids]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("text", [PROMPT, FREE])
def test_the_text_is_the_same_in_fewer_steps(
    cluster: LocalCluster, engine: Engine, text: str, temperature: float
) -> None:
    made = cluster.client.completions.create(
        model=MODEL,
        prompt=text,
        max_tokens=OUTPUT,
        temperature=temperature,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens = [token for chunk in made for choice in chunk.choices for token in choice.token_ids]  # type: ignore[attr-defined]
    assert tokens == plain(engine, text, temperature)
    cluster.settle()


def test_drafts_were_right_and_are_counted(cluster: LocalCluster) -> None:
    (decode,) = cluster.worker_urls("decode")
    samples = scrape(decode)
    accepted = value(samples, "kvferry_spec_decode_accepted_tokens_total")
    assert 0 < accepted <= value(samples, "kvferry_spec_decode_draft_tokens_total")
    assert value(samples, "kvferry_step_tokens_total", phase="decode") >= 2 * OUTPUT * len(TEMPERATURES) - 4


def test_a_draft_model_of_another_vocabulary_is_refused_in_one_line(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "LlamaConfig")
    for command in ("serve", "decode"):
        flags = ("--num-speculative-tokens", "4", "--speculative-model", str(tmp_path))
        words = (sys.executable, "-m", "kvferry.cli.main", command, "--model", "smollm2", *flags)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert f"has a vocabulary of {VOCAB} tokens, {MODEL} has another of 49152" in line
