"""The dashboard: its queries name metrics that exist and find series; its panels tell what they show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import start_http_server

from docs.dashboard import made
from protocol.metrics import WorkerMetrics
from tests.deploy import dashboard
from tests.deploy.dashboard import failing_queries, known_names, metric_names, panel_queries, serving_router
from tests.deploy.prometheus import query, running_prometheus, wait_scraped

PANELS = [panel for panel in dashboard.load()["panels"] if panel["type"] != "row"]
UNITS = {"short", "s", "reqps", "percentunit", "Bps"}


@pytest.fixture(scope="module")
def idle_cluster() -> Iterator[str]:
    """A Prometheus that scrapes the metrics of a router, a prefill and a decode process that did nothing yet."""
    sets = [serving_router(), WorkerMetrics("prefill"), WorkerMetrics("decode")]
    servers = [start_http_server(0, "127.0.0.1", metrics.registry) for metrics in sets]
    try:
        with running_prometheus([f"127.0.0.1:{server.server_port}" for server, _ in servers]) as url:
            wait_scraped(url, len(servers))
            yield url
    finally:
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()


def test_the_dashboard_is_what_its_description_makes() -> None:
    assert dashboard.DASHBOARD.read_text() == made(), "run: make docs"


def test_every_metric_of_the_dashboard_exists() -> None:
    known = known_names()
    assert len(panel_queries()) >= 40
    for item in panel_queries():
        names = metric_names(item.expression)
        assert names, item
        assert names <= known, f"{item.panel}: {names - known}"


def test_every_query_finds_a_series_before_the_first_request(idle_cluster: str) -> None:
    assert failing_queries(idle_cluster) == []


def test_a_wrong_query_would_be_noticed(idle_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        dashboard.PanelQuery("empty", 'kvferry_nodes{role="prefil"}', ""),
        dashboard.PanelQuery("invalid", "rate(kvferry_nodes", ""),
    ]
    monkeypatch.setattr(dashboard, "panel_queries", lambda: broken)
    assert [line.partition(":")[0] for line in failing_queries(idle_cluster)] == ["empty", "invalid"]


def test_series_that_share_a_panel_can_be_told_apart(idle_cluster: str) -> None:
    for item in panel_queries():
        series = query(idle_cluster, item.promql)
        labels = set().union(*(entry["metric"] for entry in series)) - {"__name__", "job"}
        for label in labels:
            assert f"{{{{{label}}}}}" in item.legend, f"{item.panel}: {item.legend!r} does not show {label}"


def test_both_sections_show_what_they_must() -> None:
    sections: dict[str, set[str]] = {}
    current: set[str] = set()
    for panel in dashboard.load()["panels"]:
        if panel["type"] == "row":
            current = sections.setdefault(panel["title"], set())
        for target in panel.get("targets", ()):
            current |= metric_names(target["expr"])
    overview, prefix = sections["Cluster overview"], sections["Prefix cache"]
    assert {
        "kvferry_requests_total",
        "kvferry_time_to_first_token_seconds_bucket",
        "kvferry_inter_token_latency_seconds_bucket",
        "kvferry_requests_waiting",
        "kvferry_requests_running",
        "kvferry_output_tokens_total",
        "kvferry_nodes",
        "kvferry_kv_blocks",
        "kvferry_ship_bytes_total",
        "kvferry_ship_exposed_seconds_total",
        "kvferry_ladder_rungs_total",
        "kvferry_grants_total",
    } <= overview
    assert {
        "kvferry_prefix_cache_hits_tokens_total",
        "kvferry_prefix_cache_queries_tokens_total",
        "kvferry_predicted_reuse_tokens_total",
        "kvferry_actual_reuse_tokens_total",
        "kvferry_index_rows",
        "kvferry_kv_blocks_evicted_total",
    } <= prefix


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_says_what_it_shows_and_asks_the_chosen_datasource(panel: dict) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    for holder in (panel, *panel["targets"]):
        assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    assert panel["type"] == "stat" or all(target["legendFormat"] for target in panel["targets"])


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard.load()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert grid["x"] + grid["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own


def test_the_datasource_is_a_variable_and_no_query_names_one() -> None:
    board = dashboard.load()
    assert [(item["name"], item["type"]) for item in board["templating"]["list"]] == [("datasource", "datasource")]
    assert board["uid"] == "kvferry"
