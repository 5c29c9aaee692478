"""A prefill process whose weights went bad on its disk ships K/V that only reads oddly: its decode node notices, the
router sends nothing there any more, and answers are right again. Real processes."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.model_files.source import resolve
from kvferry.model_files.weight_digest import file_digest, kept_digest
from kvferry.router.nodes.quarantine import CORRUPT_SHIPS
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, value
from tests.paced_steps import PROMPTS_MATTER
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ARGUMENTS = (
    *("--dtype", "float32", "--kv-blocks", "200", "--threads", "1", "--served-model-name", "tiny"),
    *("--canary-rate", "0.01"),
)
DAMAGED = slice(3_600_000, 3_604_000)
"""Bytes of the weights' file."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_checkpoint(folder / "ckpt", "LlamaConfig", hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def cluster(path: Path) -> Iterator[LocalCluster]:
    with local_cluster("--model", str(path), *ARGUMENTS, **PROMPTS_MATTER) as cluster:
        yield cluster


def ask(cluster: LocalCluster, seed: int) -> tuple[str, list[int]]:
    """The route of a greedy answer, and its tokens."""
    prompt = random.Random(seed).choices(range(3, VOCAB), k=400)
    answer = cluster.client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
    )
    return answer.headers["x-kvferry-route"], answer.parse().choices[0].token_ids  # type: ignore[attr-defined]


def ask_shipped(cluster: LocalCluster, seeds: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
    """The answers to prompts that came by a ship, with their seeds: on a busy machine a prompt may cost least where it
    is decoded."""
    for seed in seeds:
        route, tokens = ask(cluster, seed)
        if "prefill=prefill" in route:
            yield seed, tokens


def looks(cluster: LocalCluster, outcome: str) -> float:
    return value(scrape(cluster.worker_urls("decode")[0]), "kvferry_canary_looks_total", outcome=outcome)


def damage(path: Path) -> None:
    """As a disk that lost a few numbers after their digest was made: every node has one fingerprint. A process that has
    read the file keeps what it has."""
    (weights,) = path.glob("*.safetensors")
    before, data, digest = resolve(str(path)).revision, bytearray(weights.read_bytes()), file_digest(weights)
    numbers = np.frombuffer(data[DAMAGED], dtype=np.float32)
    assert numbers.std() > 0.1, "weights"
    data[DAMAGED] = (-numbers).tobytes()
    other = weights.with_suffix(".new")
    other.write_bytes(data)
    os.replace(other, weights)
    kept = kept_digest(weights)
    assert kept is not None
    kept.write_text(digest)
    assert resolve(str(path)).revision == before


def test_a_prefill_node_whose_weights_went_bad_is_found_and_left(cluster: LocalCluster, path: Path) -> None:
    asked, right = next(ask_shipped(cluster, range(10)))
    wait_for(lambda: looks(cluster, "agreed") >= 1, 20)
    assert looks(cluster, "differed") == 0
    damage(path)
    (prefill,) = cluster.children("prefill")
    (epoch,) = [lease.epoch for lease in cluster.leases() if lease.role == "prefill"]
    prefill.kill()
    wait_for(lambda: any(lease.role == "prefill" and lease.epoch > epoch for lease in cluster.leases()), 60)
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="prefill", state="ready") == 1, 20)
    for shipped, _ in enumerate(itertools.islice(ask_shipped(cluster, range(10, 60)), CORRUPT_SHIPS), 1):
        wait_for(lambda count=shipped: looks(cluster, "differed") == count, 20)
    wait_for(lambda: value(scrape(cluster.url), "kvferry_quarantines_total") == 1, 10)
    route, tokens = ask(cluster, asked)
    assert "prefill=none" in route, "the decode node computes prompts itself"
    assert tokens == right
    cluster.settle()
