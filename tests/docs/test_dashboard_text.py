"""From the dashboard's description to what Grafana imports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs.dashboard import dashboard, legend, promql, text

CHOSEN = 'cluster=~"$cluster", namespace=~"$namespace"'


@pytest.mark.parametrize(
    ("short", "long", "shown"),
    [
        ("sum by (role, state) (x)", "sum by (role, state) (x)", "{{role}} {{state}}"),
        ('rate(x{role="a"}) / rate(y)', 'rate(x{role="a"}[$__rate_interval]) / rate(y[$__rate_interval])', ""),
        ("sum(kvferry_registry_up)", f"sum(kvferry_registry_up{{{CHOSEN}}})", ""),
        ('kvferry_kv_blocks{state="free"}', f'kvferry_kv_blocks{{state="free", {CHOSEN}, model_name=~"$model"}}', ""),
        (
            "rate(kvferry_output_tokens_total)",
            f'rate(kvferry_output_tokens_total{{{CHOSEN}, model_name=~"$model"}}[$__rate_interval])',
            "",
        ),
        ("p95(x)", "histogram_quantile(0.95, sum by (le) (rate(x_bucket[$__rate_interval])))", ""),
        ("p50 by role(x)", "histogram_quantile(0.5, sum by (role, le) (rate(x_bucket[$__rate_interval])))", "{{role}}"),
    ],
)
def test_short_queries(short: str, long: str, shown: str) -> None:
    assert promql(short) == long
    assert legend(long) == shown


def panels(**kinds: Any) -> list[dict[str, Any]]:
    made = dashboard("name", {"title": "t", "sections": {"first": kinds, "second": kinds}})
    assert json.loads(text(made)) == made
    found: list[dict[str, Any]] = made["panels"]
    return found


def test_panels_flow_from_left_to_right_and_sections_down() -> None:
    graph = {"about": "A.", "query": "x"}
    found = panels(numbers={"n": graph}, graphs={name: graph for name in "abcd"} | {"wide": {**graph, "width": 16}})
    places = [tuple(panel["gridPos"].values()) for panel in found[:7]]
    row, number, *graphs = places
    assert (row, number) == ((0, 0, 24, 1), (0, 1, 4, 4))
    assert graphs == [(0, 5, 8, 8), (8, 5, 8, 8), (16, 5, 8, 8), (0, 13, 8, 8), (8, 13, 16, 8)]
    assert found[7]["gridPos"]["y"] == 21
    assert [panel["id"] for panel in found] == list(range(1, 15))


def test_what_a_panel_may_say() -> None:
    def defaults(kind: str, **says: Any) -> dict[str, Any]:
        made: dict[str, Any] = panels(**{kind: {"p": {"about": "A.", "query": "x", **says}}})[1]["fieldConfig"]
        return made["defaults"]  # type: ignore[no-any-return]

    assert [step["color"] for step in defaults("numbers", red_below=1)["thresholds"]["steps"]] == ["red", "green"]
    assert defaults("numbers", decimals=0)["decimals"] == 0
    assert (defaults("graphs")["min"], defaults("graphs")["unit"]) == (0, "short")
    assert "min" not in defaults("graphs", signed=True)
    assert defaults("graphs", unit="percentunit")["max"] == 1
    assert defaults("graphs", stacked=True)["custom"]["stacking"]["mode"] == "normal"


def test_several_queries_and_quantiles_have_legends() -> None:
    several, one_each = panels(
        graphs={
            "several": {"about": "A.", "queries": {"up": "x", "down": "rate(y)"}},
            "quantiles": {"about": "A.", "quantiles": "z by role"},
        }
    )[1:3]
    assert [(item["refId"], item["legendFormat"]) for item in several["targets"]] == [("A", "up"), ("B", "down")]
    assert [item["legendFormat"] for item in one_each["targets"]] == ["{{role}} p50", "{{role}} p95"]
    assert "sum by (role, le)" in one_each["targets"][1]["expr"]
