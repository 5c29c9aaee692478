"""The component with an endpoint picker: objects fit their schemas, ports and labels agree, flags parse."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvferry.cli.main import kvferry
from tests.deploy import crds
from tests.deploy.binaries import kubectl_binary, need
from tests.deploy.engines import engine_pods
from tests.deploy.manifests import (
    K8S,
    Manifest,
    Objects,
    container_command,
    of_kind,
    pod_specs,
    render,
    render_within,
)
from tests.deploy.test_custom_objects import complaints

NAME, POOL = "kvferry-epp", "kvferry-engines"
EXTENSION = "inference.networking.k8s.io"


@functools.cache
def with_component() -> Objects:
    """Objects of the cpu overlay with the component in it, as the component's head says."""
    binary = need(kubectl_binary(), "kubectl")
    overlay = yaml.safe_load((K8S / "overlays" / "cpu" / "kustomization.yaml").read_text())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        paths = {"resources": ["base"], "components": ["components/endpoint-picker"]}
        found = {kind: [os.path.relpath(K8S / name, folder) for name in names] for kind, names in paths.items()}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump({**overlay, **found}))
        done = subprocess.run([binary, "kustomize", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


@pytest.fixture
def objects() -> Objects:
    return with_component()


@pytest.fixture
def added(objects: Objects) -> list[Manifest]:
    """Objects that only the component brings, or changes."""
    before = render("cpu")
    return [item for item in objects if item not in before]


@pytest.fixture
def params(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    argv, env = container_command(objects, NAME)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert argv[:2] == ["kvferry", "epp"]
    return kvferry.commands["epp"].make_context("epp", argv[2:]).params


def test_the_objects_fit_their_schemas(added: list[Manifest]) -> None:
    kinds = sorted(item["kind"] for item in added)
    assert kinds == [
        "Deployment", "HTTPRoute", "InferencePool", "NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget", "Service",
    ]  # fmt: skip
    for item in added:
        if item["kind"] == "InferencePool":
            crds.check(item)
        elif item["kind"] != "HTTPRoute":
            kubernetes_validate.validate(item, "1.36", strict=True)


def test_the_route_fits_the_gateway_api(objects: Objects) -> None:
    route = of_kind(objects, "HTTPRoute")[POOL]
    assert complaints([route]) == [""]
    assert complaints([{**route, "spec": {**route["spec"], "rules": [{"matches": 5}]}}]) != [""]


def test_a_wrong_field_would_be_noticed(objects: Objects) -> None:
    pool = of_kind(objects, "InferencePool")[POOL]
    for spoilt in ({"replica": 2}, {"targetPorts": []}, {"endpointPickerRef": {}}):
        with pytest.raises(jsonschema.ValidationError):
            crds.check({**pool, "spec": {**pool["spec"], **spoilt}})


def test_route_pool_and_service_lead_to_the_picker(objects: Objects, params: dict[str, Any]) -> None:
    (backend,) = of_kind(objects, "HTTPRoute")[POOL]["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": EXTENSION, "kind": "InferencePool", "name": POOL}
    picker = of_kind(objects, "InferencePool")[POOL]["spec"]["endpointPickerRef"]
    service = of_kind(objects, "Service")[picker["name"]]["spec"]
    (port,) = service["ports"]
    assert picker["port"]["number"] == port["port"] == params["port"]
    container = pod_specs(objects)[NAME]["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "grpc": params["port"], "grpc-health": params["health_port"], "http": params["metrics_port"],
    }  # fmt: skip
    template = of_kind(objects, "Deployment")[NAME]["spec"]["template"]["metadata"]
    assert service["selector"].items() <= template["labels"].items()
    assert template["annotations"]["prometheus.io/port"] == str(params["metrics_port"])


def test_probes_ask_for_health_services_that_exist(objects: Objects, params: dict[str, Any]) -> None:
    container = pod_specs(objects)[NAME]["containers"][0]
    asked = {kind: container[kind]["grpc"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {each["port"] for each in asked.values()} == {params["health_port"]}
    assert {kind: each["service"] for kind, each in asked.items()} == {
        "startupProbe": "liveness", "livenessProbe": "liveness", "readinessProbe": "readiness",
    }  # fmt: skip


def test_the_grace_period_fits_the_drain(objects: Objects, params: dict[str, Any]) -> None:
    needed = params["drain_delay"] + params["request_timeout"]
    assert needed + 10 <= pod_specs(objects)[NAME]["terminationGracePeriodSeconds"]
    (rule,) = of_kind(objects, "HTTPRoute")[POOL]["spec"]["rules"]
    assert rule["timeouts"]["request"] == f"{params['request_timeout']:g}s"


def test_pickers_and_engines_reach_redis(objects: Objects) -> None:
    (rule,) = of_kind(objects, "NetworkPolicy")["kvferry-redis"]["spec"]["ingress"]
    (peer,) = rule["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    labels = of_kind(objects, "InferencePool")[POOL]["spec"]["selector"]["matchLabels"]
    assert {"epp", labels["app.kubernetes.io/component"]} <= {*expression["values"]}


def test_the_pool_finds_engines_where_gateways_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the component `engines`, which alone listen on the loopback address."""
    objects = render_within("gpu", "engines", "endpoint-picker")
    pool = of_kind(objects, "InferencePool")[POOL]["spec"]
    engine = of_kind(objects, "Deployment")["kvferry-engine-vllm"]
    assert pool["selector"]["matchLabels"].items() <= engine["spec"]["template"]["metadata"]["labels"].items()
    (port,) = pool["targetPorts"]
    pod = engine_pods(objects, monkeypatch)["vllm"]
    assert pod.after("--host") == "0.0.0.0"
    url = pod.adapter["url"].replace("$(KVFERRY_ADVERTISE_HOST)", pod.adapter["advertise_host"])
    assert url == f"http://10.1.2.3:{pod.after('--port')}" == f"http://10.1.2.3:{port['number']}"
    rules = of_kind(objects, "NetworkPolicy")["kvferry-engines"]["spec"]["ingress"]
    assert {"ports": [{"port": port["number"], "protocol": "TCP"}]} in rules
    (redis,) = of_kind(objects, "NetworkPolicy")["kvferry-redis"]["spec"]["ingress"]
    members = redis["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert len(set(members)) == len(members)
    assert {"epp", "engine"} <= {*members}


def test_the_picker_s_pods_are_as_restricted_as_the_router_s(objects: Objects) -> None:
    specs = pod_specs(objects)
    picker, router = specs[NAME], specs["kvferry-router"]
    for field in (
        "securityContext",
        "volumes",
        "serviceAccountName",
        "automountServiceAccountToken",
        "enableServiceLinks",
    ):
        assert picker[field] == router[field]
    for field in ("securityContext", "volumeMounts", "resources", "image", "envFrom", "env"):
        assert picker["containers"][0][field] == router["containers"][0][field]
