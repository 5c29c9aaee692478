"""The dashboards against a live cluster scraped by a real Prometheus: every query finds a series, and what they show is
what the client counted itself."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.crowded import crowded
from tests.deploy.dashboard import failing_queries, load, panel_query
from tests.deploy.prometheus import query, running_prometheus, wait_for, wait_scraped
from tests.engine_adapter.fleet import fleet
from tests.local_cluster import MODEL, LocalCluster, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROUTE = re.compile(r"prefill=(\S+) decode=(\S+) reused=(\d+) computed=(\d+)")
ENGINES = "engines"
"""The dashboard of adapters, which this cluster lacks."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Asked:
    """A request as its client saw it. remote: its header says that a prefill node computed the prompt."""

    endpoint: str
    status: int
    prompt: int = 0
    cached: int = 0
    output: int = 0
    remote: bool = False


@dataclass
class Watched:
    """A cluster that nobody else asked anything, what was asked of it, and the Prometheus that saw it all."""

    url: str
    asked: list[Asked]

    def total(self, what: str, **where: object) -> int:
        return sum(getattr(one, what) for one in self.served(**where))

    def served(self, **where: object) -> list[Asked]:
        answered = [one for one in self.asked if one.status == 200]
        return [one for one in answered if all(getattr(one, name) == value for name, value in where.items())]

    def shown(self, board: str, panel: str, legend: str = "") -> dict[Any, float]:
        """What a panel shows since the cluster started, by its labels' values in order of their names; what is zero is
        left out."""
        found = query(self.url, panel_query(board, panel, legend).totals)
        by_labels = {tuple(value for _, value in sorted(each["metric"].items())): each["value"][1] for each in found}
        return {labels: float(figure) for labels, figure in by_labels.items() if float(figure)}

    def figure(self, board: str, panel: str, legend: str = "") -> float:
        return self.shown(board, panel, legend).get((), 0.0)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with local_cluster("--prefill", "1", "--decode", "1") as cluster:
        workers = [*cluster.worker_urls("prefill"), *cluster.worker_urls("decode")]
        targets = [url.removeprefix("http://") for url in (cluster.url, *workers)]
        with running_prometheus(targets) as url:
            wait_scraped(url, len(targets))
            asked = list(ask_all(cluster))
            cluster.settle()
            wait_for(url, f"count(timestamp(up) > {time.time()}) == {len(targets)}")
            yield Watched(url, asked)


def ask_all(cluster: LocalCluster) -> Iterator[Asked]:
    """Prompts that share prefixes, one after the other, a stream, and two mistakes."""
    draw = random.Random(99)
    prefix = draw.choices(range(1000, 40000), k=320)
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        for tail in range(5, 11):
            yield ask(client, COMPLETIONS, {"prompt": [*prefix, *draw.choices(range(1000, 40000), k=8 * tail)]})
        yield ask(client, COMPLETIONS, {"prompt": prefix[:100]})
        messages = [{"role": "user", "content": "Count to three."}]
        yield stream(client, {"messages": messages, "stream_options": {"include_usage": True}})
        yield ask(client, COMPLETIONS, {"prompt": prefix, "temperature": 9})
        yield ask(client, COMPLETIONS, {"prompt": prefix, "model": "nobody's"})


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Asked:
    answer = client.post(path, json={"model": MODEL, "max_tokens": 6, **body})
    if answer.status_code != 200:
        return Asked(path, answer.status_code)
    return told(path, answer.headers["x-kvferry-route"], answer.json()["usage"])


def stream(client: httpx.Client, body: dict[str, Any]) -> Asked:
    usage = None
    with client.stream("POST", CHAT, json={"model": MODEL, "max_tokens": 6, "stream": True, **body}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
        assert usage is not None
        return told(CHAT, answer.headers["x-kvferry-route"], usage)


def told(path: str, header: str, usage: dict[str, Any]) -> Asked:
    route = ROUTE.fullmatch(header)
    assert route, header
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (cached, usage["prompt_tokens"]) == (int(route[3]), int(route[3]) + int(route[4]))
    return Asked(path, 200, usage["prompt_tokens"], cached, usage["completion_tokens"], route[1] != "none")


def test_every_query_finds_a_series(watched: Watched) -> None:
    assert failing_queries(watched.url, {*load()} - {ENGINES}) == []


def test_every_query_about_engines_finds_a_series() -> None:
    with fleet() as made:
        engine = made.add()
        made.start_router("smollm2")
        made.ready(1)
        targets = [url.removeprefix("http://") for url in (made.router_url, engine.adapter_url)]
        with running_prometheus(targets) as url:
            wait_scraped(url, len(targets))
            assert failing_queries(url, {ENGINES}) == []


def test_requests_are_those_that_were_sent(watched: Watched) -> None:
    statuses, endpoints = (Counter((str(getattr(one, of)),) for one in watched.asked) for of in ("status", "endpoint"))
    assert len(watched.served()) == 8
    assert watched.shown("overview", "Requests by status") == statuses
    assert watched.shown("router", "Requests by endpoint") == endpoints
    assert watched.figure("overview", "Requests") == len(watched.asked)
    assert watched.figure("overview", "In progress") == 0


def test_tokens_are_those_that_the_client_counted(watched: Watched) -> None:
    prompt, cached, output = (watched.total(what) for what in ("prompt", "cached", "output"))
    assert cached > 4 * 300
    assert watched.figure("overview", "Output") == output
    assert watched.shown("overview", "Output by model") == {(MODEL,): output}
    for board in ("overview", "prefix-cache"):
        sources = watched.shown(board, "Prompt tokens by source")
        assert sum(sources.values()) == prompt
        assert sources[("computed",)] == prompt - cached
        assert watched.figure(board, "Prompt tokens reused") == pytest.approx(cached / prompt, abs=1e-12)
    by_kind = {("cached",): cached, ("output",): output, ("prompt",): prompt}
    assert watched.shown("router", "Tokens by tenant") == by_kind, "the tenant without a name has no label"


def test_predictions_misses_and_luck_add_up_to_what_the_client_was_told(watched: Watched) -> None:
    board, panel = "prefix-cache", "Predicted and actual reuse"
    predicted, missed, luck, reused = (
        watched.figure(board, panel, legend) for legend in ("predicted", "missed", "beyond prediction", "reused")
    )
    assert reused == watched.total("cached")
    assert predicted + luck == reused + missed
    assert predicted > 0
    assert sum(watched.shown(board, "Misses by reason").values()) == missed
    assert sum(watched.shown(board, "Miss ratio by reason").values()) == pytest.approx(missed / predicted, abs=1e-12)
    assert watched.figure(board, "Missed predictions") == pytest.approx(missed / predicted, abs=1e-12)


def test_nodes_did_what_the_client_was_told(watched: Watched) -> None:
    """On a busy machine a request has a second attempt now and then: it counts too, and so does what its nodes did."""
    remote, local = len(watched.served(remote=True)), len(watched.served(remote=False))
    seconds = watched.shown("router", "Retries, by step")
    extra = sum(seconds.values())
    assert not extra or crowded()
    placed = watched.shown("router", "Placements")
    hedges = sum(seconds.get((kind,), 0) for kind in ("hedge", "suspicion"))
    assert remote + local + hedges <= sum(placed.values()) <= remote + local + extra
    assert local <= placed.get(("local",), 0) <= local + extra
    if not remote:
        pytest.skip("this machine is so busy that no prompt was placed on the prefill node")
    transfers, grants = watched.shown("transfers", "Transfers"), watched.shown("transfers", "Grants")
    assert remote <= transfers[("done",)] <= sum(transfers.values()) <= remote + extra
    assert remote <= grants[("granted",)] <= sum(grants.values()) <= remote + extra
    longest = max(one.prompt for one in watched.asked)
    prompt, cached = watched.total("prompt", remote=True), watched.total("cached", remote=True)
    computed = watched.shown("pools", "Tokens computed")[("prefill", "prefill")]
    assert prompt - cached <= computed <= prompt - cached + extra * longest
    looked_up = watched.shown("prefix-cache", "Prefix queries and hits", "{{role}} looked up")[("prefill",)]
    assert prompt <= looked_up <= prompt + extra * longest
    found = watched.shown("prefix-cache", "Prefix queries and hits", "{{role}} found").get(("prefill",), 0)
    assert cached <= found <= cached + extra * longest


def test_books_balance_and_nothing_is_left(watched: Watched) -> None:
    assert watched.figure("pools", "Blocks") > 0
    assert watched.figure("pools", "Unaccounted blocks") == 0
    assert watched.figure("pools", "In use") == 0
    assert watched.shown("pools", "Blocks reserved too long") == {}
