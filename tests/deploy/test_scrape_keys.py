"""Scrapes with the operator's key see tenants, others do not: a real Prometheus, with what the chart renders and with
the scrape configurations, against a router that has keys. Workers are never shown the key."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.cli.preflight import free_port
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, says
from tests.deploy.charts import chart
from tests.deploy.manifests import SECRET, Manifest, Objects, container_command, of_kind, pod_specs, render
from tests.deploy.prometheus import configured_prometheus, query, wait_for
from tests.deploy.promtool import MONITORING, promtool
from tests.fake_workers import lease_of

KEYED: dict[str, Any] = {"existingSecret": "chat-keys", "operatorSecret": {"name": "chat-operator"}}
MONITORED: dict[str, Any] = {"podMonitor": {"enabled": True}}
OWN_SECRET = {"secret": {"name": "other", "key": "token"}}
FILES = ("prometheus.yml", "prometheus-kubernetes.yml")
COMMENTED = re.compile(r"(?m)^( *)#(?=authorization:|  type:|  credentials_file:)")
TENANTS = {"acme", "other"}


@dataclass
class RecordingWorker:
    """A worker that notes which credentials a scrape shows it."""

    shown: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.shown.append(dict(scope["headers"]).get(b"authorization", b""))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"kvferry_seen 1\n"})


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """`host:port` of a server of the app."""
    port = free_port("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def keyed_router(objects: Objects, keys: Path, worker: str) -> Api:
    """A router with the keys that a rendered one has, two tenants, and one node."""
    _, env = container_command(objects, "kvferry-router")
    keys.write_text(entry("acme", "a") + entry("other", "o"))
    cluster = FakeCluster(says("Yes."))
    cluster.nodes = [lease_of("d0", "decode", http_url=f"http://{worker}")]
    return Api(cluster, api_key=env["KVFERRY_API_KEY"], api_keys=str(keys))


def endpoints(**values: Any) -> dict[str, Manifest]:
    """The endpoints of the chart's PodMonitor, by the components that they keep."""
    (monitor,) = of_kind(chart(**values), "PodMonitor").values()
    return {item["relabelings"][0]["regex"]: item for item in monitor["spec"]["podMetricsEndpoints"]}


def operator_reference(objects: Objects) -> dict[str, str]:
    """Where the router's --api-key comes from."""
    env = pod_specs(objects)["kvferry-router"]["containers"][0]["env"]
    (found,) = [item["valueFrom"]["secretKeyRef"] for item in env if item["name"] == "KVFERRY_API_KEY"]
    return dict(found)


def as_job(name: str, endpoint: Manifest, target: str) -> Manifest:
    """What the Prometheus operator makes of an endpoint, where each Secret holds SECRET."""
    told = {"type": endpoint["authorization"]["type"], "credentials": SECRET} if "authorization" in endpoint else None
    job = {"job_name": name, "metrics_path": endpoint["path"], "static_configs": [{"targets": [target]}]}
    return {**job, "authorization": told} if told else job


def jobs_of(file: str, credentials: Path | None) -> list[Manifest]:
    """The jobs of a scrape configuration: as it is, or with the key that its comments offer."""
    text = (MONITORING / file).read_text()
    if credentials is not None:
        text = COMMENTED.sub(r"\1", text).replace("/etc/prometheus/kvferry/api-key", str(credentials))
    return list(yaml.safe_load(text)["scrape_configs"])


def local_jobs(case: str, credentials: Path | None, router: str) -> list[Manifest]:
    """The jobs of prometheus.yml, renamed, with the router where it is."""
    jobs = yaml.safe_load(yaml.safe_dump(jobs_of("prometheus.yml", credentials)).replace("127.0.0.1:8000", router))
    for job in jobs:
        job["job_name"] = f"{case}-{job['job_name']}"
        job["relabel_configs"] = [{"target_label": "job", "replacement": case}]
    return list(jobs)


def test_prometheus_sees_tenants_with_the_key_alone(tmp_path: Path) -> None:
    keyed = chart(apiKeys=KEYED, monitoring=MONITORED)
    key = tmp_path / "api-key"
    key.write_text(SECRET)
    worker = RecordingWorker()
    with served(worker) as node:
        api = keyed_router(keyed, tmp_path / "keys.toml", node)
        with served(api.app) as router:
            for tenant in ("a", "o"):
                headers = {"authorization": f"Bearer {tenant}"}
                answer = httpx.post(f"http://{router}/v1/completions", headers=headers, json={"prompt": "x"})
                assert answer.status_code == 200
            with_key = endpoints(apiKeys=KEYED, monitoring=MONITORED)
            jobs = [
                as_job("chart-key", with_key["router"], router),
                as_job("chart-worker", with_key["prefill|decode"], node),
                as_job("chart", endpoints(monitoring=MONITORED)["router|prefill|decode"], router),
                *local_jobs("file-key", key, router),
                *local_jobs("file", None, router),
            ]
            with configured_prometheus({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}) as url:
                wait_for(url, 'up{job="file-key", node="d0"} == 1')
                wait_for(url, "count(kvferry_requests_total) by (job) > 0 and on() count(up == 1) >= 6")
                wait_for(url, "count(count by (job) (kvferry_requests_total)) == 4")
                time.sleep(2)
                seen = query(url, 'count by (job, tenant) (kvferry_tenant_tokens_total{tenant!=""})')
                discovered = query(url, 'up{node="d0"}')
    found = {(each["metric"]["job"], each["metric"]["tenant"]) for each in seen}
    assert found == {(job, tenant) for job in ("chart-key", "file-key") for tenant in TENANTS}
    assert {each["metric"]["job"] for each in discovered} == {"file-key"}, "the list of nodes needs a key"
    assert len(worker.shown) > 2
    assert set(worker.shown) == {b""}, "workers know no tenants"


def test_the_pod_monitor_presents_the_key_of_the_routers() -> None:
    values: dict[str, Any] = {"apiKeys": KEYED, "monitoring": MONITORED}
    told = endpoints(**values)["router"]["authorization"]
    assert told == {"type": "Bearer", "credentials": operator_reference(chart(**values))}
    assert told["credentials"] == {"name": "chat-operator", "key": "api-key"}
    values["monitoring"] = {**MONITORED, "authorization": OWN_SECRET}
    assert endpoints(**values)["router"]["authorization"]["credentials"] == OWN_SECRET["secret"]


def test_only_endpoints_of_routers_have_a_key_and_components_are_scraped_once() -> None:
    for tls in ({}, {"tls": {"secretName": "t"}}):
        found = endpoints(apiKeys=KEYED, monitoring=MONITORED, router=tls)
        assert set(found) == {"router", "prefill|decode"}
        assert "authorization" not in found["prefill|decode"]
        assert found["router"]["scheme"] == ("https" if tls else "http")


def test_certificates_can_be_verified_before_the_key_is_sent() -> None:
    tls = {"ca": {"secret": {"name": "ca", "key": "ca.crt"}}, "serverName": "chat.example"}
    monitoring = {"podMonitor": {"enabled": True, "tlsConfig": tls}}
    values: dict[str, Any] = {"apiKeys": KEYED, "router": {"tls": {"secretName": "t"}}}
    assert endpoints(**values, monitoring=monitoring)["router"]["tlsConfig"] == tls
    assert endpoints(**values, monitoring=MONITORED)["router"]["tlsConfig"] == {"insecureSkipVerify": True}


def test_the_component_gives_routers_the_key_that_its_comment_creates() -> None:
    reference = operator_reference(render("cpu", "operator-key"))
    text = (MONITORING.parent / "k8s" / "components" / "operator-key" / "kustomization.yaml").read_text()
    assert f"create secret generic {reference['name']} --from-literal={reference['key']}=" in text


@pytest.mark.parametrize("file", FILES)
def test_a_file_with_its_comments_removed_is_valid_and_shows_the_key_to_routers_alone(
    file: str, tmp_path: Path
) -> None:
    key = tmp_path / "api-key"
    key.write_text(SECRET)
    jobs = {job["job_name"]: job for job in jobs_of(file, key)}
    for job in jobs.values():
        job.pop("kubernetes_sd_configs", None)  # Debian builds Prometheus without it
    (tmp_path / "config.yml").write_text(yaml.safe_dump({"scrape_configs": list(jobs.values())}))
    assert "SUCCESS" in promtool("check", "config", tmp_path / "config.yml")
    assert [name for name, job in jobs.items() if "authorization" in job] == ["kvferry-router"]
    assert not [job for job in jobs_of(file, None) if "authorization" in job]
