"""Real processes with a random model: what one computed is on disk, or in a store, when it is killed, and the one that
follows reads it and computes the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.fetching import PromptClient, nodes
from kvferry.kv_transfer.tiers.object_groups import GROUP
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import idle, scrape, value
from tests.object_store import s3
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS, BLOCK = 1900, 16
BLOCKS = TOKENS // BLOCK
SLOW: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
}
"""A model that takes longer for the prompt than a store for an answer."""


def test_a_killed_node_finds_its_blocks_again(tmp_path: Path) -> None:
    model: Path = save_checkpoint(tmp_path / "ckpt", "LlamaConfig", max_position_embeddings=2048)
    options = ("--dtype", "float32", "--kv-blocks", "600", "--threads", "1", "--kv-disk-path", str(tmp_path / "kept"))
    answers = []
    for start in ("first", "second"):
        folder = tmp_path / start
        folder.mkdir()
        with (
            nodes(str(model), folder, *options, names=("prefill",)) as (node,),
            httpx.Client(trust_env=False, timeout=60) as client,
        ):
            url = node.lease.http_url
            answers.append(PromptClient(client, VOCAB).first(node, TOKENS, 1)[1])
            ways = {"first": "written", "second": "read"}
            moved = "kvferry_tier_blocks_total"
            wait_for(lambda: value(scrape(url), moved, tier="disk", way=ways[start]) == BLOCKS, 20)  # noqa: B023
            wait_for(lambda: idle(scrape(url)), 20)  # noqa: B023
            assert value(scrape(url), "kvferry_tier_bytes") > BLOCKS * node.lease.block_bytes
            assert value(scrape(url), "kvferry_account_violations_total") == 0
            node.process.send_signal(signal.SIGKILL)
            node.process.wait()
    before, after = answers
    assert before.token_ids == after.token_ids
    assert before.reuse is not None
    assert before.reuse.computed == TOKENS
    assert after.reuse is not None
    assert (after.reuse.reused_prefill, after.reuse.computed) == (BLOCKS * BLOCK, TOKENS % BLOCK)


def test_a_node_that_comes_later_reads_what_another_left_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Path = save_checkpoint(tmp_path / "ckpt", "LlamaConfig", **SLOW)
    whole = TOKENS // BLOCK // GROUP * GROUP
    with s3(monkeypatch) as address, httpx.Client(trust_env=False, timeout=60) as client:
        options = ("--dtype", "float32", "--kv-blocks", "600", "--threads", "1", "--kv-remote-url", address)
        answers = []
        for way in ("written", "read"):
            folder = tmp_path / way
            folder.mkdir()
            with nodes(str(model), folder, *options, names=("prefill",)) as (node,):
                url = node.lease.http_url
                answers.append(PromptClient(client, VOCAB).first(node, TOKENS, 1)[1])
                moved = "kvferry_tier_blocks_total"
                wait_for(lambda: value(scrape(url), moved, tier="remote", way=way) == whole, 20)  # noqa: B023
                wait_for(lambda: idle(scrape(url)), 20)  # noqa: B023
                assert value(scrape(url), "kvferry_account_violations_total") == 0
                node.process.send_signal(signal.SIGKILL)
                node.process.wait()
    before, after = answers
    assert before.token_ids == after.token_ids
    assert (before.reuse.computed, after.reuse.reused_prefill) == (TOKENS, whole * BLOCK)
