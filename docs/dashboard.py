"""Renders the Grafana dashboards from their descriptions: `python -m docs.dashboard`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.variables import VARIABLES, scoped

DASHBOARDS = Path(__file__).resolve().parent.parent / "deploy" / "monitoring" / "dashboards"

Json = dict[str, Any]
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
FRAME: Json = {
    "schemaVersion": 39,
    "version": 1,
    "editable": True,
    "graphTooltip": 1,
    "timezone": "browser",
    "refresh": "10s",
    "time": {"from": "now-30m", "to": "now"},
    "templating": {"list": VARIABLES},
    "annotations": {"list": []},
    "tags": ["kvferry", "llm"],
    "links": [
        {
            "title": "kvferry",
            "type": "dashboards",
            "tags": ["kvferry"],
            "asDropdown": True,
            "includeVars": True,
            "keepTime": True,
            "targetBlank": False,
            "icon": "external link",
            "tooltip": "",
            "url": "",
        }
    ],
}
"""Fields that Grafana needs in any dashboard; each dashboard links to the others."""
SIZES = {"numbers": (4, 4), "graphs": (8, 8)}
"""Width and height of the panels of each kind."""
SHAPES: dict[str, Json] = {
    "numbers": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "graphs": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}
_QUANTILE = re.compile(r"\bp(\d+)(?: by (\w+))?\((\w+)\)")
_RATE = re.compile(r"\brate\(([^()\[\]]+)\)")
_LABELS = re.compile(r"\bby \(([\w, ]+)\)")


def promql(text: str) -> str:
    """Return a query as Grafana sends it.

    `rate(x)` becomes a rate over Grafana's interval, `p95 by role(x)` a quantile of histogram x. All series are limited
    to the chosen variables."""

    def quantile(found: re.Match[str]) -> str:
        labels = f"{found[2]}, le" if found[2] else "le"
        return f"histogram_quantile(0.{found[1].rstrip('0')}, sum by ({labels}) (rate({found[3]}_bucket)))"

    return scoped(_RATE.sub(r"rate(\1[$__rate_interval])", _QUANTILE.sub(quantile, text)))


def legend(query: str) -> str:
    """Return the labels that distinguish the series of a query."""
    labels = _LABELS.search(query)
    return " ".join(f"{{{{{label}}}}}" for label in labels[1].split(", ") if label != "le") if labels else ""


def dashboard(name: str, description: Json) -> Json:
    """Return a dashboard that Grafana can import."""
    about = {key: value for key, value in description.items() if key != "sections"}
    panels = [{"id": number, **panel} for number, panel in enumerate(_panels(description["sections"]), 1)]
    return {**FRAME, "uid": f"kvferry-{name}", **about, "panels": panels}


def text(board: Json) -> str:
    """Return JSON with one panel per line."""
    head = json.dumps({name: value for name, value in board.items() if name != "panels"})
    panels = ",\n".join(json.dumps(panel, separators=(",", ":")) for panel in board["panels"])
    return f'{head[:-1]}, "panels": [\n{panels}\n]}}\n'


def _panels(sections: Mapping[str, Json]) -> Iterator[Json]:
    """Yield rows of panels from left to right, section under section."""
    y = 0
    for title, kinds in sections.items():
        yield {"type": "row", "title": title, "collapsed": False, "gridPos": _at(0, y, COLUMNS, 1), "panels": []}
        y += 1
        for kind, panels in kinds.items():
            x, (usual, height) = 0, SIZES[kind]
            for name, panel in panels.items():
                width = panel.get("width", usual)
                if x + width > COLUMNS:
                    x, y = 0, y + height
                yield _panel(kind, name, panel, _at(x, y, width, height))
                x += width
            y += height


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(kind: str, name: str, panel: Json, place: Json) -> Json:
    targets = [_target(ref, title, promql(query)) for ref, (title, query) in zip("ABCD", _queries(panel), strict=False)]
    return {
        "type": "stat" if kind == "numbers" else "timeseries",
        "title": name,
        "description": panel["about"],
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": _number(panel) if kind == "numbers" else _graph(panel), "overrides": []},
        "options": SHAPES[kind],
    }


def _queries(panel: Json) -> list[tuple[str, str]]:
    """Return queries by legend."""
    if "quantiles" in panel:
        histogram, by, label = panel["quantiles"].partition(" by ")
        prefix = f"{{{{{label}}}}} " if label else ""
        return [(f"{prefix}{name}", f"{name}{by}{label}({histogram})") for name in ("p50", "p95")]
    return list(panel["queries"].items()) if "queries" in panel else [(legend(promql(panel["query"])), panel["query"])]


def _target(ref: str, title: str, query: str) -> Json:
    source = {"refId": ref, "datasource": DATASOURCE, "editorMode": "code"}
    return {**source, "expr": query, "legendFormat": title, "range": True}


def _number(panel: Json) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if "red_below" in panel:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel["red_below"]}]
    decimals = {"decimals": panel["decimals"]} if "decimals" in panel else {}
    return {
        "unit": panel.get("unit", "short"),
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
        **decimals,
    }


def _graph(panel: Json) -> Json:
    unit, stacked = panel.get("unit", "short"), panel.get("stacked", False)
    lines = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    bounds = {} if panel.get("signed") else {"min": 0}
    return {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "custom": lines,
        **bounds,
        **({"max": 1} if unit == "percentunit" else {}),
    }


def dashboard_files() -> dict[Path, str]:
    """Return the dashboards' files as rendered from their descriptions."""
    found = sorted(DASHBOARDS.glob("*.yaml"))
    return {
        path.with_suffix(".json"): text(dashboard(path.stem, yaml.safe_load(path.read_text())))
        for path in found
        if path.stem != "kustomization"
    }


if __name__ == "__main__":
    for path, content in dashboard_files().items():
        path.write_text(content)
