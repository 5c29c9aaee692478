"""The dashboard's state and `kvferry top` over a running cluster: what they say is what clients were told."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import httpx
import pytest

from kvferry.router.dashboard.state import State
from tests.local_cluster import MODEL, LocalCluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
COUNT, LONG, OUT = 6, 320, 5


def state(cluster: LocalCluster) -> State:
    return State.model_validate_json(httpx.get(f"{cluster.url}/dashboard/state", timeout=10).content)


def ask(cluster: LocalCluster, prompt: list[int], name: str) -> tuple[str, dict[str, Any]]:
    """The route in the answer's header, and the usage in its body."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUT, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
    return answer.headers["x-kvferry-route"], answer.json()["usage"]


def test_what_is_shown_is_what_clients_were_told(cluster: LocalCluster) -> None:
    before = state(cluster)
    prefix = random.Random(7).choices(range(1000, 40000), k=LONG)
    told = {f"top-{n}": ask(cluster, [*prefix, 1000 + n], f"top-{n}") for n in range(COUNT)}
    wait_for(lambda: state(cluster).total.requests == before.total.requests + COUNT)
    after = state(cluster)
    assert after.total.output - before.total.output == COUNT * OUT
    prompts = sum(after.total.prompt.values()) - sum(before.total.prompt.values())
    assert prompts == COUNT * (LONG + 1) == sum(usage["prompt_tokens"] for _, usage in told.values())
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for _, usage in told.values())
    assert after.total.reused - before.total.reused == cached > LONG
    rows = {row.id: row for row in after.recent}
    for name, (route, usage) in told.items():
        row = rows[name]
        assert f"prefill={row.prefill or 'none'} decode={row.decode or 'none'} reused={row.cached} " in route
        assert (row.prompt, row.output, row.outcome) == (LONG + 1, usage["completion_tokens"], "done")
    assert {(node.id, node.role) for node in after.nodes} == {(each.node_id, each.role) for each in cluster.leases()}
    for node in after.nodes:
        blocks = node.blocks
        assert blocks.active + blocks.cached + blocks.granted + blocks.free == blocks.total > 0
    roles = {node.id: node.role for node in after.nodes}
    ships = [each for each in after.transfers if each.kind == "ship"]
    assert all((roles[each.source], roles[each.target]) == ("prefill", "decode") for each in ships)

    command = [sys.executable, "-m", "kvferry.cli.main", "top", "--once", "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for part in (after.router, *(node.id for node in after.nodes), *told):
        assert part in done.stdout
