"""A decode node is asked to end under running streams: they go on at the other one, without a prompt computed again.

In float32, so that other batches cannot change a token. A tiny model at a set pace: streams are in their middle on any
machine when their node is asked to end.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
COUNT, BEGUN = 40, 10
STEP_S = 0.02
"""Seconds that a step of a node lasts at least."""
ARGUMENTS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--threads", "1", "--kv-blocks", "1000"),
    *("--prefill", "1", "--decode", "2"),
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "frequency_penalty": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0, "guided_regex": "([a-z]+, )+"},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 0, "logit_bias": {"260": 3}},
]


@dataclass
class Stream:
    """What a client saw: token ids, and when each chunk came."""

    kind: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    node: str = ""

    def run(self, cluster: LocalCluster) -> None:
        token_ids = random.Random(self.kind).choices(range(3, VOCAB), k=150)
        body = {"model": MODEL, "prompt": token_ids, "max_tokens": COUNT, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, **KINDS[self.kind]}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            self.node = response.headers["x-kvferry-route"].split("decode=")[1].split()[0]
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    self.tokens += chunk["choices"][0].get("token_ids") or []
                    self.logprobs += (chunk["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
                    self.times.append(time.monotonic())


def all_kinds(cluster: LocalCluster, drain: Callable[[str], None] | None = None) -> list[Stream]:
    """A stream of each kind; `drain` is called with the node that has most of them when each is in its middle."""
    streams = [Stream(kind) for kind in range(len(KINDS))]
    threads = [threading.Thread(target=stream.run, args=(cluster,)) for stream in streams]
    for thread in threads:
        thread.start()
    if drain is not None:
        wait_for(lambda: all(len(stream.tokens) >= BEGUN for stream in streams), 60)
        drain(busiest(streams))
    for thread in threads:
        thread.join(120)
    return streams


def busiest(streams: list[Stream]) -> str:
    return Counter(stream.node for stream in streams).most_common(1)[0][0]


def prompt_tokens(url: str) -> float:
    """That a node has computed, but for those of streams one by one."""
    return value(scrape(url), "kvferry_step_tokens_total", phase="prefill")


def recoveries(cluster: LocalCluster) -> float:
    """Attempts that were begun since others failed."""
    retries = scrape(cluster.url)["kvferry_retries_total"]
    return sum(number for labels, number in retries if labels["step"] not in ("move", "hedge", "suspicion"))


def longest_pause(streams: list[Stream], since: float = 0.0) -> float:
    return max(b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False) if b > since)


def test_streams_of_a_node_that_ends_go_on_at_another(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model", "LlamaConfig")
    with local_cluster("--model", str(path), *ARGUMENTS, step_s=STEP_S) as cluster:
        undisturbed = all_kinds(cluster)
        urls = {lease.node_id: lease.http_url for lease in cluster.leases() if lease.role == "decode"}
        before: dict[str, float] = {}

        def drain(node_id: str) -> None:
            cluster.worker(node_id).terminate()
            (before["other"],) = [prompt_tokens(url) for node, url in urls.items() if node != node_id]

        recovered = recoveries(cluster)
        moved = all_kinds(cluster, drain)
        (other,) = [url for node, url in urls.items() if node != busiest(moved)]
        moves = value(scrape(cluster.url), "kvferry_retries_total", step="move")
        computed = prompt_tokens(other) - before["other"]
        print(f"\nmoves {moves:.0f}, tokens computed by the other node {computed:.0f}")
        pauses = longest_pause(undisturbed), longest_pause(moved)
        print(f"longest pause: {pauses[0]:.3f} s undisturbed, {pauses[1]:.3f} s with the drain")
        for old, new in zip(undisturbed, moved, strict=True):
            assert len(new.tokens) == COUNT
            assert new.tokens == old.tokens, f"kind {new.kind}"
            assert new.logprobs == pytest.approx(old.logprobs, abs=1e-3)
        assert moves >= sum(stream.node == busiest(moved) for stream in moved) >= 1
        assert recoveries(cluster) == recovered, "nothing was recovered"
        assert computed <= 64, "no prompt is computed again"
        assert longest_pause(moved) < 3.0
        wait_for(lambda: len(cluster.worker_urls("decode")) == 2, 60)
        cluster.settle()
