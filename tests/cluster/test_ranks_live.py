"""Nodes of two ranks each that divide a mixture's experts, as a user starts them: the same tokens, and a rank that dies
is replaced with its node."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.oracle import Answer
from tests.cluster.tiny_checkpoints import VOCAB, greedy, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, streams_running, value
from tests.paced_steps import PROMPTS_MATTER
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-blocks", "2000", "--threads", "1")
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def other_ranks(cluster: LocalCluster, node: str) -> list[psutil.Process]:
    return [child for child in cluster.worker(node).children() if "kvferry.worker.rank" in child.cmdline()]


def expect(cluster: LocalCluster, answer: Answer, path: str) -> None:
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    made = cluster.client.completions.create(
        model="tiny", prompt=list(answer.prompt), max_tokens=16, temperature=0, extra_body=extra
    )
    answer.check(made.choices[0].token_ids, path)  # type: ignore[attr-defined]


def test_nodes_of_two_ranks_and_their_ends(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "tiny", "Qwen3MoeConfig", head_dim=16, **EXPERTS)
    prompts = [random.Random(count).choices(range(3, VOCAB), k=count) for count in (21, 150, 400)]
    wanted = greedy(path, prompts)
    drafts, patient = ("--num-speculative-tokens", "4"), ("--queue-timeout", "100")
    flags = (*FLAGS, *drafts, *patient)  # the only decode node starts anew: on busy cores that takes its time
    with local_cluster(
        "--model", str(path), "-tp", "2", "--enable-expert-parallel", *flags, **PROMPTS_MATTER
    ) as cluster:
        with streams_running(cluster, "tiny", 8):
            for answer in wanted:
                expect(cluster, answer, "disaggregated")
        assert value(scrape(cluster.url), "kvferry_placements_total", kind="remote") >= 1
        assert [len(other_ranks(cluster, node)) for node in ("prefill-0", "decode-0")] == [1, 1]

        (rank,), node = other_ranks(cluster, "decode-0"), cluster.worker("decode-0")
        rank.kill()
        wait_for(lambda: not node.is_running(), 30.0)
        expect(cluster, wanted[1], "after a rank died")
        (rank,), node = other_ranks(cluster, "decode-0"), cluster.worker("decode-0")
        node.kill()
        wait_for(lambda: not rank.is_running(), 30.0)
        expect(cluster, wanted[2], "after a node was killed")
        cluster.settle(30.0)
        left = [*other_ranks(cluster, "prefill-0"), *other_ranks(cluster, "decode-0")]
    assert len(left) == 2
    wait_for(lambda: not any(each.is_running() for each in left), 30.0)


def test_what_ranks_cannot_divide_is_refused_in_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "tiny", "LlamaConfig")
    for command, flags, why in (
        ("serve", ("-tp", "4"), "tensor_parallel_size 4 does not divide the model's K/V heads: 2"),
        ("decode", ("-tp", "4"), "tensor_parallel_size 4 does not divide the model's K/V heads: 2"),
        ("serve", ("-tp", "2", "--enable-expert-parallel"), "--enable-expert-parallel: the model has no experts"),
    ):
        line = [sys.executable, "-m", "kvferry.cli.main", command, "--model", str(path), "--port", "0", *FLAGS, *flags]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        errors = [each for each in done.stderr.splitlines() if each.startswith("kvferry: error: ")]
        assert len(errors) == 1
        assert errors[0].endswith(why)
        assert "Traceback" not in done.stderr
