"""The dashboards: their queries name metrics that exist, find series and keep to what is chosen; panels tell what they
show."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import start_http_server

from docs.dashboard import dashboard_files
from docs.variables import of_models
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from tests.deploy import dashboard
from tests.deploy.binaries import ROOT, kubectl_binary, need
from tests.deploy.dashboard import (
    DASHBOARDS,
    failing_queries,
    known_names,
    metric_names,
    panel_queries,
    serving_adapter,
    serving_node,
    serving_router,
)
from tests.deploy.prometheus import query, running_prometheus, wait_scraped

BOARDS = dashboard.load()
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
UNITS = {"short", "s", "reqps", "percentunit", "Bps", "bytes"}
ROLES = ("prefill", "decode")
LABELS = {"cluster": "east", "namespace": "ns"}


@pytest.fixture(scope="module")
def idle_cluster() -> Iterator[str]:
    """A Prometheus that scrapes a router, a node of each role and an adapter, which did nothing yet."""
    sets: list[RouterMetrics | WorkerMetrics] = [serving_router(), *map(serving_node, ROLES), serving_adapter()]
    servers = [start_http_server(0, "127.0.0.1", metrics.registry) for metrics in sets]
    try:
        targets = [f"127.0.0.1:{server.server_port}" for server, _ in servers]
        with running_prometheus(targets, labels=LABELS) as url:
            wait_scraped(url, len(servers))
            yield url
    finally:
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()


def test_the_dashboards_are_what_their_descriptions_make() -> None:
    files = dashboard_files()
    assert sorted(path.stem for path in files) == [
        "engines",
        "overview",
        "pools",
        "prefix-cache",
        "router",
        "transfers",
    ]
    assert {path: path.read_text() for path in DASHBOARDS.glob("*.json")} == files, "run: make docs"


def test_every_metric_of_the_dashboards_exists() -> None:
    known = known_names()
    assert len(panel_queries()) >= 60
    for item in panel_queries():
        names = metric_names(item.expression)
        assert names, item
        assert names <= known, f"{item.panel}: {names - known}"


def test_every_query_finds_a_series_before_the_first_request(idle_cluster: str) -> None:
    assert failing_queries(idle_cluster) == []


def test_a_wrong_query_would_be_noticed(idle_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        dashboard.PanelQuery("b", "empty", 'kvferry_nodes{role="prefil"}', ""),
        dashboard.PanelQuery("b", "invalid", "rate(kvferry_nodes", ""),
    ]
    monkeypatch.setattr(dashboard, "panel_queries", lambda: broken)
    assert [line.partition(":")[0] for line in failing_queries(idle_cluster)] == ["empty", "invalid"]


@pytest.mark.parametrize("variable", ["cluster", "namespace", "model"])
def test_every_query_keeps_to_what_is_chosen(idle_cluster: str, variable: str) -> None:
    right = {"model": "m", **LABELS}[variable]
    for item in panel_queries():
        concerned = variable != "model" or metric_names(item.expression) & of_models()
        assert query(idle_cluster, item.promql(**{variable: right})), item
        assert bool(query(idle_cluster, item.promql(**{variable: "another"}))) != bool(concerned), item


def test_the_variables_find_their_values(idle_cluster: str) -> None:
    found = {}
    for item in BOARDS["overview"]["templating"]["list"]:
        if item["type"] == "query":
            parts = re.fullmatch(r"label_values\((.+), (\w+)\)", item["query"]["query"])
            assert parts, item
            series = query(idle_cluster, parts[1].replace("$cluster", ".*").replace("$namespace", ".*"))
            found[item["name"]] = {each["metric"].get(parts[2]) for each in series}
            assert (item["includeAll"], item["allValue"]) == (True, ".*")
    assert found == {"cluster": {"east"}, "namespace": {"ns"}, "model": {"m"}}


def test_series_that_share_a_panel_can_be_told_apart(idle_cluster: str) -> None:
    for item in panel_queries():
        series = query(idle_cluster, item.promql())
        labels = set().union(*(entry["metric"] for entry in series)) - {"__name__", "job", *LABELS}
        for label in labels:
            assert f"{{{{{label}}}}}" in item.legend, f"{item.panel}: {item.legend!r} does not show {label}"


def test_dashboards_show_what_they_must() -> None:
    shown: dict[str, set[str]] = {}
    for item in panel_queries():
        shown.setdefault(item.board, set()).update(metric_names(item.expression))
    assert {
        "kvferry_requests_total",
        "kvferry_time_to_first_token_seconds_bucket",
        "kvferry_inter_token_latency_seconds_bucket",
        "kvferry_requests_waiting",
        "kvferry_output_tokens_total",
        "kvferry_nodes",
        "kvferry_registry_up",
    } <= shown["overview"]
    assert {
        "kvferry_prefix_cache_hits_tokens_total",
        "kvferry_prefix_cache_queries_tokens_total",
        "kvferry_predicted_reuse_tokens_total",
        "kvferry_unpredicted_reuse_tokens_total",
        "kvferry_reuse_miss_tokens_total",
        "kvferry_index_rows",
        "kvferry_kv_blocks_evicted_total",
    } <= shown["prefix-cache"]
    assert {"kvferry_kv_blocks", "kvferry_kv_outlived_hold_seconds", "kvferry_requests_running"} <= shown["pools"]
    assert {"kvferry_ship_bytes_total", "kvferry_ship_exposed_seconds_total", "kvferry_grants_total"} <= shown[
        "transfers"
    ]
    assert {
        "kvferry_engine_up",
        "kvferry_engine_epoch",
        "kvferry_engine_guarantee",
        "kvferry_engine_continued_streams",
        "kvferry_engine_swallowed_tokens",
        "kvferry_mirror_difference_tokens",
        "kvferry_mirror_gaps",
        "kvferry_mirror_resets",
        "kvferry_requests_waiting",
        "kvferry_kv_blocks",
    } <= shown["engines"]
    assert {"kvferry_retries_total", "kvferry_placements_total", "kvferry_requests_queued"} <= shown["router"]


def test_no_panel_sets_misses_off_against_luck() -> None:
    for item in panel_queries():
        if "kvferry_actual_reuse_tokens_total" in metric_names(item.expression):
            assert "kvferry_predicted" not in item.expression, item


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_and_asks_the_chosen_datasource(panel: dict) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    for holder in (panel, *panel["targets"]):
        assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    assert panel["type"] == "stat" or all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_ids_and_titles_of_their_own_and_do_not_overlap(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert grid["x"] + grid["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_has_a_name_of_its_own_variables_and_links(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"kvferry-{name}"
    assert board["title"] == f"kvferry: {name.replace('-', ' ')}"
    assert [item["name"] for item in board["templating"]["list"]] == ["datasource", "cluster", "namespace", "model"]
    assert "kvferry" in board["tags"]
    assert [(link["type"], link["tags"], link["includeVars"]) for link in board["links"]] == [
        ("dashboards", ["kvferry"], True)
    ]


def test_runbooks_name_panels_that_there_are() -> None:
    told = re.sub(r"\*\*.+?\*\*", "", (ROOT / "deploy" / "runbooks.md").read_text())
    titles = {panel["title"] for board in BOARDS.values() for panel in board["panels"]}
    titles |= {board["title"] for board in BOARDS.values()} | {name.replace("-", " ") for name in BOARDS}
    named = {re.sub(r"\s+", " ", name) for name in re.findall(r"\*([^*]+)\*", told)}
    assert len(named) > 15
    assert named <= titles, named - titles


def test_they_come_as_config_maps_of_what_grafana_imports() -> None:
    command: list[str | Path] = [need(kubectl_binary(), "kubectl"), "kustomize", DASHBOARDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    assert {item["kind"] for item in found} == {"ConfigMap"}
    held = {}
    for item in found:
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((file, content),) = item["data"].items()
        assert item["metadata"]["name"] == f"kvferry-dashboard-{file.removeprefix('kvferry-').removesuffix('.json')}"
        held[json.loads(content)["uid"] + ".json"] = file
    assert sorted(held) == sorted(held.values()) == sorted(f"kvferry-{name}.json" for name in BOARDS)
