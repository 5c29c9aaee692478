"""The autoscalers' manifests: KEDA's schema, one set of queries in all of them, and nothing else that sets replicas."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from kvferry.cli.options import variable
from kvferry.protocol.settings import RouterSettings
from tests.deploy.binaries import ROOT, need, promtool_binary
from tests.deploy.dashboard import known_names, metric_names
from tests.deploy.keda import complaints, rendered
from tests.deploy.manifests import OVERLAYS, PROCESSES, Manifest, of_kind
from tests.deploy.trials import adapter_queries, hpa, keda

SCALED = ROOT / "deploy" / "k8s" / "components" / "keda" / "scaledobjects.yaml"


def scaled_objects() -> list[Manifest]:
    return list(yaml.safe_load_all(SCALED.read_text()))


def test_the_scaled_objects_fit_kedas_schema_and_wrong_ones_would_not() -> None:
    assert complaints(scaled_objects()) == []
    wrong = copy.deepcopy(scaled_objects()[:2])
    wrong[0]["spec"]["minReplicaCount"] = "two"
    wrong[1]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behaviour"] = {}
    assert complaints(wrong) == ["data/spec/minReplicaCount must be integer", "behaviour is no field"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_with_the_component_keda_alone_owns_replicas_and_routers_wait_for_the_first_node(overlay: str) -> None:
    objects = rendered(overlay)
    assert not of_kind(objects, "HorizontalPodAutoscaler")
    scaled, deployments = of_kind(objects, "ScaledObject"), of_kind(objects, "Deployment")
    assert set(scaled) == set(PROCESSES)
    for name, item in scaled.items():
        assert item["spec"]["scaleTargetRef"] == {"name": name}
        assert item["metadata"]["namespace"] == "kvferry"
        assert "replicas" not in deployments[name]["spec"]
    (shared,) = (item["data"] for name, item in of_kind(objects, "ConfigMap").items() if "-cluster-" in name)
    assert float(shared[variable("queue_timeout")]) >= 120 > RouterSettings().queue_timeout


def test_both_kinds_of_autoscaler_ask_the_same_and_act_alike() -> None:
    for pool, own in hpa().items():
        other = keda()[pool]
        for signal in own.signals:
            assert (signal.query, signal.target) in [(s.query, s.target) for s in other.signals]
        assert (own.behavior, own.most) == (other.behavior, other.most)
        assert own.least >= max(1, other.least)


def test_no_failure_of_prometheus_ends_the_last_pod() -> None:
    for item in scaled_objects():
        assert item["spec"]["fallback"]["replicas"] >= max(1, item["spec"]["minReplicaCount"])
        for trigger in item["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_every_query_is_of_one_namespace_and_over_metrics_that_exist(tmp_path: Path) -> None:
    queries = [signal.query for scaled in keda().values() for signal in scaled.signals]
    queries += adapter_queries().values()
    known = known_names()
    for query in queries:
        assert "<<" not in query
        assert metric_names(query) <= known, query
        assert query.count('namespace="kvferry"') == query.count("{")
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "scaling", "rules": rules}]}))
    binary = need(promtool_binary(), "promtool")
    done = subprocess.run([binary, "check", "rules", tmp_path / "rules.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_adapter_finds_what_its_rules_are_about() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml").read_text())["externalRules"]
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} <= known_names()
    assert all(rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}} for rule in rules)
    used = {signal.query for scaled in hpa().values() for signal in scaled.signals}
    assert used == set(adapter_queries().values())
