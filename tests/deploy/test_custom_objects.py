"""Objects that Kubernetes itself does not know, against the schemas of those who do, and what is in them."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import yaml

from tests.deploy.binaries import ROOT, crds, need, promtool_binary
from tests.deploy.charts import chart
from tests.deploy.dashboard import known_names, metric_names
from tests.deploy.installations import CUSTOM, INSTALLATIONS
from tests.deploy.manifests import PROCESSES, Manifest, of_kind, pod_specs

PACKAGES = dict(zip(CUSTOM, ("keda", "gateway-api", "prometheus-operator"), strict=True))
CHECK = """
const items = JSON.parse(require('fs').readFileSync(0));
const told = items.map(({folder, item}) => {
  const [group, version] = item.apiVersion.split('/');
  const module = require(`${folder}/${group}/${version}/${item.kind}.js`);
  try { new module[item.kind](item).validate(); return ''; } catch (error) { return String(error.message); }
});
console.log(JSON.stringify(told));
"""


def custom() -> list[Manifest]:
    keda = chart(
        "chat", autoscaling={"kind": "keda", "keda": {"authentication": "a", "metadata": {"authModes": "bearer"}}}
    )
    made = [*keda, *(item for each in INSTALLATIONS.values() for item in each())]
    return [item for item in made if item["apiVersion"].partition("/")[0] in CUSTOM]


def complaints(items: list[Manifest]) -> list[str]:
    """What the schema of each object's own project says about it; empty: nothing."""
    folder = need(crds(), "node_modules") / "@kubernetes-models"
    given = [{"folder": str(folder / PACKAGES[item["apiVersion"].partition("/")[0]]), "item": item} for item in items]
    done = subprocess.run(["node", "-e", CHECK], input=json.dumps(given), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_they_fit_their_schemas() -> None:
    items = custom()
    assert {item["kind"] for item in items} == {"ScaledObject", "HTTPRoute", "PodMonitor", "PrometheusRule"}
    assert complaints(items) == [""] * len(items)


def test_a_wrong_field_would_be_noticed() -> None:
    wrong = [dict(item, spec={**item["spec"], **spoilt(item["kind"])}) for item in custom()]
    assert all(complaints(wrong))


def spoilt(kind: str) -> dict[str, Any]:
    fields: dict[str, dict[str, Any]] = {
        "ScaledObject": {"scaleTargetRef": {}},
        "HTTPRoute": {"parentRefs": [{"name": 3}]},
        "PodMonitor": {"selector": "all"},
        "PrometheusRule": {"groups": [{"rules": []}]},
    }
    return fields[kind]


def test_the_rules_are_the_alerts() -> None:
    (rule,) = of_kind(chart(monitoring={"prometheusRule": {"enabled": True}}), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text())


def test_the_dashboards_are_those_that_are_imported() -> None:
    made = of_kind(chart(monitoring={"dashboards": {"enabled": True}}), "ConfigMap")["kvferry-dashboards"]
    files = {path.name: path.read_text() for path in (ROOT / "deploy" / "monitoring" / "dashboards").glob("*.json")}
    assert len(files) == 6
    assert made["data"] == files
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_queries_of_scaled_objects_are_of_this_release_and_of_metrics_that_exist(tmp_path: Any) -> None:
    scaled = of_kind(chart("chat", autoscaling={"kind": "keda", "matchLabels": {"release": "chat"}}), "ScaledObject")
    assert scaled.keys() == {name.replace("kvferry", "chat-kvferry") for name in PROCESSES}
    known, rules = known_names(), []
    for name, item in scaled.items():
        assert item["spec"]["scaleTargetRef"]["name"] == name
        for trigger in item["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert metric_names(query) <= known
            assert len(re.findall(r'namespace="kvferry",release="chat"', query)) == query.count("kvferry_")
            rules.append({"record": "tried", "expr": query})
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    done = subprocess.run([need(promtool_binary(), "promtool"), "check", "rules", "--lint=none", path])
    assert done.returncode == 0


def test_a_pod_monitor_finds_the_ports_of_processes_alone() -> None:
    """One target a pod, of the job that the alerts name; Redis has no metrics."""
    objects = chart(monitoring={"podMonitor": {"enabled": True}})
    (monitor,) = of_kind(objects, "PodMonitor").values()
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in PROCESSES:
        ports = [port["name"] for port in pod_specs(objects)[name]["containers"][0]["ports"]]
        assert ports.count(endpoint["port"]) == 1
    (component,) = monitor["spec"]["selector"]["matchExpressions"]
    assert component["values"] == [name.removeprefix("kvferry-") for name in PROCESSES]


def test_a_route_lasts_as_long_as_a_request() -> None:
    values: dict[str, Any] = {
        "router": {"requestTimeout": 900},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gate"}]},
    }
    objects = chart(**values)
    (route,) = of_kind(objects, "HTTPRoute").values()
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "900s"}
    (backend,) = rule["backendRefs"]
    service = of_kind(objects, "Service")[backend["name"]]
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
