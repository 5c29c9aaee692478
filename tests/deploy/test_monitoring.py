"""Scrape configurations, alert rules and the adapter's rules, checked by promtool and a real Prometheus."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import ROOT, need, promtool_binary
from tests.deploy.dashboard import known_names, metric_names
from tests.deploy.manifests import PROCESSES, of_kind, render

MONITORING = ROOT / "deploy" / "monitoring"


def promtool(*arguments: str | Path) -> str:
    """Output of promtool, which must be content. The test is skipped where there is none."""
    binary = need(promtool_binary(), "promtool")
    done = subprocess.run([binary, *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_local_configuration_is_valid_and_finds_its_files() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    job = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"][0]
    patterns = [pattern for entry in job["file_sd_configs"] for pattern in entry["files"]]
    assert [path for pattern in patterns for path in MONITORING.glob(pattern)]


def test_the_kubernetes_configuration_scrapes_our_pods_once_and_names_them(tmp_path: Path) -> None:
    """Debian builds Prometheus without its Kubernetes discovery: what that would find is written out instead."""
    config = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text())
    job = config["scrape_configs"][0]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = [
        {"targets": [f"10.0.0.{number}:{port['containerPort']}"], "labels": labels}
        for number, name in enumerate((*PROCESSES, "kvferry-redis"))
        for port, labels in discovered(name, f"10.0.0.{number}")
    ]
    config["rule_files"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    promtool("check", "config", tmp_path / "config.json")
    found = json.loads(promtool("check", "service-discovery", "--timeout=1s", tmp_path / "config.json", "kvferry"))
    kept = [item["labels"] for item in found if item["labels"]]
    assert sorted((item["component"], item["__address__"], item["__metrics_path__"]) for item in kept) == [
        ("decode", "10.0.0.2:9001", "/metrics"),
        ("prefill", "10.0.0.1:9000", "/metrics"),
        ("router", "10.0.0.0:8000", "/metrics"),
    ]
    assert {(item["namespace"], item["pod"]) for item in kept} == {("kvferry", f"{name}-x") for name in PROCESSES}


def discovered(deployment: str, pod_ip: str) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The container ports of a pod and the meta labels that Prometheus' discovery gives each."""
    template = of_kind(render("cpu"), "Deployment")[deployment]["spec"]["template"]
    meta = {"namespace": "kvferry", "pod_name": f"{deployment}-x", "pod_ip": pod_ip}
    for kind in ("label", "annotation"):
        for name, value in template["metadata"].get(f"{kind}s", {}).items():
            meta[f"pod_{kind}_{''.join(c if c.isalnum() else '_' for c in name)}"] = value
    ports = template["spec"]["containers"][0]["ports"]
    return [
        (port, {f"__meta_kubernetes_{k}": v for k, v in {**meta, "pod_container_port_name": port["name"]}.items()})
        for port in ports
    ]


def test_alert_rules_are_valid_and_fire_as_their_tests_say() -> None:
    promtool("check", "rules", "alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_every_metric_of_an_alert_exists() -> None:
    known = known_names()
    for rule in alerts():
        names = metric_names(rule["expr"])
        assert names <= known, f"{rule['alert']}: {names - known}"
        assert names or rule["expr"].startswith("up{"), rule["alert"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Kvferry")
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "action"}
    assert not rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["action"].endswith(".")


def test_adapter_rules_are_valid_promql_over_metrics_that_exist(tmp_path: Path) -> None:
    """The adapter fills its templates in like this for the pods of one namespace."""
    rules = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text())["rules"]
    known, filled = known_names(), []
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0]
        assert series in known
        expression = rule["metricsQuery"].replace("<<.Series>>", series)
        expression = expression.replace("<<.LabelMatchers>>", 'namespace="kvferry",pod=~"a|b"')
        expression = expression.replace("<<.GroupBy>>", "pod")
        assert "<<" not in expression
        filled.append({"record": rule["name"]["as"] + ":filled", "expr": expression})
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "adapter", "rules": filled}]}))
    promtool("check", "rules", path)
