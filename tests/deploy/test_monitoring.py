"""Scrape configurations and the adapter's rules, checked by promtool; what alerts do is in test_alerts.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.api_parts import Api, FakeCluster, says
from tests.deploy.manifests import PROCESSES, of_kind, render
from tests.deploy.promtool import MONITORING, promtool


async def test_the_local_configuration_is_valid_and_asks_its_router_for_the_nodes() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    nodes, own = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    (router,), (discovery,) = own["static_configs"][0]["targets"], nodes["http_sd_configs"]
    asked = urlsplit(discovery["url"])
    assert asked.netloc == router
    answer = await Api(FakeCluster(says("x"))).http.get(asked.path)
    assert answer.status_code == 200
    assert isinstance(answer.json(), list)


def test_the_kubernetes_configuration_scrapes_our_pods_once_and_names_them(tmp_path: Path) -> None:
    """Debian builds Prometheus without its Kubernetes discovery: what that would find is written out instead."""
    config = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text())
    for job in config["scrape_configs"]:
        (discovery,) = job.pop("kubernetes_sd_configs")
        (selector,) = discovery["selectors"]
        assert (discovery["role"], selector["role"]) == ("pod", "pod")
        job["static_configs"] = [
            {"targets": [f"10.0.0.{number}:{port['containerPort']}"], "labels": labels}
            for number, name in enumerate((*PROCESSES, "kvferry-redis"))
            if selected(name, selector["label"])
            for port, labels in discovered(name, f"10.0.0.{number}")
        ]
    config["rule_files"] = []
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    promtool("check", "config", path)
    names = [job["job_name"] for job in config["scrape_configs"]]
    assert names == ["kvferry", "kvferry-router"]
    found = [json.loads(promtool("check", "service-discovery", "--timeout=1s", path, name)) for name in names]
    kept = [item["labels"] for items in found for item in items if item["labels"]]
    assert {item["job"] for item in kept} == {"kvferry"}
    assert sorted((item["component"], item["__address__"], item["__metrics_path__"]) for item in kept) == [
        ("decode", "10.0.0.2:9001", "/metrics"),
        ("prefill", "10.0.0.1:9000", "/metrics"),
        ("router", "10.0.0.0:8000", "/metrics"),
    ]
    assert {(item["namespace"], item["pod"]) for item in kept} == {("kvferry", f"{name}-x") for name in PROCESSES}


def selected(deployment: str, selector: str) -> bool:
    """Whether a pod's labels fit a selector of equalities."""
    labels = of_kind(render("cpu"), "Deployment")[deployment]["spec"]["template"]["metadata"]["labels"]
    terms = [re.fullmatch(r"([\w./-]+?)(!?=)([\w-]+)", term) for term in selector.split(",")]
    return all((labels.get(term[1]) == term[3]) == (term[2] == "=") for term in terms)


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
