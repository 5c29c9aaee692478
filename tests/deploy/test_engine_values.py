"""Values about engines: what is refused and why, what scales, pools, and the same from the kustomize component."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import ROOT
from tests.deploy.charts import chart, plain, refusal
from tests.deploy.engines import engine_pods
from tests.deploy.installations import ENGINES, own
from tests.deploy.kubernetes_schemas import check_object
from tests.deploy.manifests import of_kind, pod_specs, render_within
from tests.deploy.test_k8s import pod_labels, selected

ONE: dict[str, Any] = {"name": "one", "image": "vllm/vllm-openai:v0.32.0"}
ALONE: dict[str, Any] = {"model": {"servedName": "m"}, "worker": {"enabled": False}}
SCALED: dict[str, Any] = {**ONE, "autoscaling": {"enabled": True, "min": 1, "max": 3}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"role": "encode"}, "/engines/0/role"),
        ({"engine": "trtllm"}, "'vllm', 'sglang', 'llamacpp'"),
        ({"imag": "x"}, "imag"),
        ({"name": "Upper"}, "/engines/0/name"),
        ({"port": 80}, "/engines/0/port"),
        ({"port": 9001}, "port 9001 is the adapter's"),
        ({"replicas": "two"}, "/engines/0/replicas"),
        ({"resources": {"limits": {"cpu": "two"}}}, "cpu"),
        ({"image": ""}, "one: image is missing"),
        ({"image": "vllm/vllm-openai"}, "neither tag nor digest"),
        ({"image": "registry.example.org:5000/vllm"}, "neither tag nor digest"),
        ({"engine": "llamacpp"}, "GGUF file"),
        ({"engine": "llamacpp", "model": "/m.gguf", "tensorParallelSize": 2, "gpus": 2}, "tensorParallelSize"),
        ({"tensorParallelSize": 4}, "gpus is 1, less than tensorParallelSize 4"),
        ({"args": ["--kv-events-config={}"]}, "args has --kv-events-config"),
        ({"args": ["--kv_events_config.endpoint", "x"]}, "args has --kv_events_config"),
        ({"args": ["-tp", "2"]}, "args has -tp"),
        ({"args": ["--host=0.0.0.0"]}, "args has --host"),
        ({"args": ["--data-parallel-size", "2"]}, "use replicas"),
        ({"exposed": True}, "/engines/0/exposed"),
        ({"engine": "sglang", "nixl": {"enabled": True}}, "nixl is for vllm"),
        ({"workload": "StatefulSet", "cache": {"existingClaim": "c"}}, "cache.existingClaim"),
        ({"workload": "DaemonSet"}, "/engines/0/workload"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    assert told in refusal(model={"servedName": "m"}, engines=[{**ONE, **changes}])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"engines": [ONE]}, "model.servedName is missing"),
        ({"engines": [ONE, ONE], **ALONE}, "two are called one"),
        ({"worker": {"enabled": False}}, "worker.enabled is false"),
        ({"engines": [ONE], "pools": [{"name": "p", "model": {"servedName": "m"}}]}, "pools[].engines"),
        ({"engines": [SCALED], "model": {"servedName": "m"}}, "worker.enabled false"),
        ({"engines": [SCALED, {**ONE, "name": "two"}], **ALONE}, "must be its only nodes"),
        ({"engines": [{**SCALED, "autoscaling": {"enabled": True, "min": 0}}], **ALONE}, "no HorizontalPodAutoscaler"),
        ({"engineDefaults": {"role": "encode"}}, "/engineDefaults/role"),
        ({"engines": [{**ONE, "role": "prefill"}], **ALONE}, "role prefill needs nixl.enabled"),
        (
            {"engines": [{**ONE, "exposed": {"enabled": True}}], "network": {"host": "::"}, **ALONE},
            "exposed needs network.host 0.0.0.0",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], told: str) -> None:
    assert told in refusal(**values)


def test_an_exposed_engine_has_the_pod_s_address_and_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint picker names the URL of the adapter's lease to its gateway."""
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}
    group = {**ONE, "exposed": {"enabled": True, "clients": [gateway]}}
    objects = chart(**ALONE, engines=[group], autoscaling={"kind": "none"})
    pod = engine_pods(objects, monkeypatch)["one"]
    assert pod.after("--host") == "0.0.0.0"
    assert pod.adapter["url"].replace("$(KVFERRY_ADVERTISE_HOST)", "10.1.2.3") == "http://10.1.2.3:8000"
    assert pod.engine["ports"] == [{"name": "engine", "containerPort": 8000}]
    (rule,) = of_kind(objects, "NetworkPolicy")["kvferry-engine-one"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert gateway in rule["from"]
    assert len(rule["from"]) == 2, "Prometheus may scrape the engine, too"
    for item in own(objects):
        check_object(item, "1.37")
    assert "kvferry-engine-one" not in of_kind(chart(**ALONE, engines=[ONE]), "NetworkPolicy")


def test_entries_override_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"image": "registry.example.org:5000/vllm:1", "drainTimeout": 10, "nodeSelector": {"a": "b"}}
    groups = [{"name": "one"}, {"name": "two", "drainTimeout": 20, "nodeSelector": {"c": "d"}, "disruptionBudget": {}}]
    objects = chart(**ALONE, engineDefaults=defaults, engines=groups, autoscaling={"kind": "none"})
    pods = engine_pods(objects, monkeypatch)
    assert [pods[name].adapter["drain_timeout"] for name in ("one", "two")] == [10, 20]
    assert [pods[name].spec["nodeSelector"] for name in ("one", "two")] == [{"a": "b"}, {"a": "b", "c": "d"}]
    assert {pod.engine["image"] for pod in pods.values()} == {"registry.example.org:5000/vllm:1"}


@pytest.mark.parametrize(("kind", "scaler"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
@pytest.mark.parametrize("workload", ["Deployment", "StatefulSet"])
def test_engines_scale_by_the_signal_of_decode_nodes(kind: str, scaler: str, workload: str) -> None:
    """In place of them, within the group's own bounds."""
    values: dict[str, Any] = {"autoscaling": {"kind": kind}}
    objects = chart(**ALONE, **values, engines=[{**SCALED, "workload": workload}])
    scaled, expected = of_kind(objects, scaler), of_kind(chart(**values), scaler)["kvferry-decode"]["spec"]
    assert set(scaled) == {"kvferry-router", "kvferry-engine-one"}
    spec = scaled["kvferry-engine-one"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": workload, "name": "kvferry-engine-one"}
    signals = "metrics" if kind == "hpa" else "triggers"
    assert spec[signals] == expected[signals]
    assert {name[:3]: spec[name] for name in spec if name.startswith(("min", "max"))} == {"min": 1, "max": 3}
    assert "replicas" not in of_kind(objects, workload)["kvferry-engine-one"]["spec"]


def test_engines_of_pools_are_apart_and_serve_their_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [
        {"name": "big", "model": {"servedName": "org/big,big", "name": "/models/big"}, "worker": {"enabled": False},
         "engines": [{**SCALED, "replicas": 3}]},
        {"name": "small", "model": {"servedName": "small", "name": "/models/small"}, "engines": [ONE]},
    ]  # fmt: skip
    objects = chart(
        model={"volume": {"enabled": True}}, pools=pools, autoscaling={"kind": "keda"},
        monitoring={"podMonitor": {"enabled": True}},
    )  # fmt: skip
    pods = pod_labels(objects)
    engines = {"kvferry-big-engine-one", "kvferry-small-engine-one"}
    assert set(pods) == engines | {f"kvferry-{name}" for name in ("router", "redis", "small-prefill", "small-decode")}
    for kind in ("Deployment", "PodDisruptionBudget", "Service"):
        for name, item in of_kind(objects, kind).items():
            selector = item["spec"]["selector"]
            assert selected({"matchLabels": selector} if kind == "Service" else selector, pods) == [name]
    queries = [
        each["metadata"]["query"]
        for each in of_kind(objects, "ScaledObject")["kvferry-big-engine-one"]["spec"]["triggers"]
    ]
    assert all('model_name="org/big"' in query for query in queries)
    for name in engines:
        spec = pod_specs(objects)[name]
        model = "big" if "big" in name else "small"
        args = next(each for each in spec["initContainers"] if each["name"] == "engine")["args"]
        assert args[args.index("--model") + 1] == f"/models/{model}"
        served = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}["KVFERRY_SERVED_MODEL_NAME"]
        assert served == {"big": "org/big,big", "small": "small"}[model]
    (monitor,) = of_kind(objects, "PodMonitor").values()
    assert set(selected(monitor["spec"]["selector"], pods)) == set(pods) - {"kvferry-redis"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][0]["regex"] == "router|prefill|decode|engine"


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_objects_of_both_workloads_fit_the_schema(version: str) -> None:
    groups = [{**each, "workload": "StatefulSet", "cache": {"storageClass": "fast"}} for each in ENGINES["engines"]]
    made = own(chart(**{**ENGINES, "engines": groups}))
    assert len(of_kind(made, "StatefulSet")) == 3
    for item in made:
        check_object(item, version)


def test_the_component_renders_what_the_chart_does() -> None:
    """In the gpu overlay, with two vLLM engines of the overlay's model."""
    values: dict[str, Any] = {"worker": {"enabled": False}, "engines": [{**ONE, "name": "vllm", "replicas": 2}]}
    found = plain(render_within("gpu", "engines"))
    unused = found.pop("ConfigMap kvferry-worker")
    assert "KVFERRY_DEVICE" in unused["data"]
    expected = plain(chart(examples=("gpu",), **values))
    assert "ConfigMap kvferry-worker" not in expected
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        assert found[name] == item, name


def test_a_stateful_set_keeps_a_cache_for_each_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = chart(examples=("vllm-70b",))
    sets = of_kind(objects, "StatefulSet")
    assert set(sets) == {"kvferry-engine-prefill", "kvferry-engine-decode"}
    item, pod = sets["kvferry-engine-decode"], engine_pods(objects, monkeypatch)["decode"]
    (claim,) = item["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"]] == pod.volumes_at(pod.engine, "/cache")
    assert claim["metadata"]["name"] not in [each["name"] for each in pod.spec["volumes"]]
    assert claim["spec"]["resources"]["requests"]["storage"] == "250Gi"
    assert item["spec"]["serviceName"] in of_kind(objects, "Service")


@pytest.mark.parametrize(
    ("example", "groups", "gpus"), [("vllm", {"vllm": None}, 1), ("vllm-70b", {"prefill": 2, "decode": 4}, 4)]
)
def test_examples_replace_the_workers(
    example: str, groups: dict[str, int | None], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = chart(examples=(example,))
    workloads = {**of_kind(objects, "Deployment"), **of_kind(objects, "StatefulSet")}
    engines = {f"kvferry-engine-{name}" for name in groups}
    assert set(workloads) == {"kvferry-router", "kvferry-redis", *engines}
    assert "kvferry-worker" not in of_kind(objects, "ConfigMap")
    assert set(of_kind(objects, "NetworkPolicy")) == {"kvferry-router", "kvferry-engines", "kvferry-redis"}
    assert set(of_kind(objects, "PodDisruptionBudget")) == {"kvferry-router", *engines}
    for name, replicas in groups.items():
        assert workloads[f"kvferry-engine-{name}"]["spec"].get("replicas") == replicas
        pod = engine_pods(objects, monkeypatch)[name]
        assert pod.adapter["role"] == ("prefill" if name == "prefill" else "decode")
        assert pod.engine["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert ("--tensor-parallel-size" in pod.argv) == (gpus > 1)
        assert ("NVIDIA-H100-80GB-HBM3" in json.dumps(pod.spec.get("affinity"))) == (gpus > 1)


def test_the_values_of_the_guide_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    told = (ROOT / "docs" / "how-to" / "other-engines.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", told, re.DOTALL)
    pod = engine_pods(chart("chat", **yaml.safe_load(block)), monkeypatch)["vllm"]
    assert pod.after("--model") == "/models/qwen3-8b"
    assert f"deployment/{pod.name} " in told
