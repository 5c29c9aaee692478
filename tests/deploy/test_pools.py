"""Several models in one release: each has nodes, settings, budgets and autoscalers of its own; routers serve all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli.main import kvferry
from kvferry.protocol.settings import RouterSettings
from tests.deploy.charts import chart, refusal
from tests.deploy.installations import own
from tests.deploy.kubernetes_schemas import check_object
from tests.deploy.manifests import Manifest, Objects, container_command, of_kind, pod_specs
from tests.deploy.test_k8s import pod_labels, selected

CHAT: dict[str, Any] = {
    "name": "chat",
    "model": {
        "name": "/models/chat",
        "servedName": "org/chat,chat",
        "fetch": {"enabled": True, "repository": "org/chat", "tokenSecret": {"name": "hub"}},
    },
    "worker": {"gpus": 1},
    "decode": {"maxNumSeqs": 128},
    "autoscaling": {"decode": {"enabled": True, "min": 3}},
}
CODE: dict[str, Any] = {
    "name": "code",
    "model": {
        "name": "/images/code/model",
        "servedName": "code",
        "image": {"reference": "example.org/models/code:1", "mountPath": "/images/code"},
    },
    "prefill": {"replicas": 2, "extraEnv": [{"name": "KVFERRY_MAX_MODEL_LEN", "value": "4096"}]},
}
OTHER = {**CODE["model"]["image"], "reference": "example.org/models/other:1"}
POOLS: dict[str, Any] = {
    "model": {"volume": {"enabled": True}},
    "pools": [CHAT, CODE],
    "autoscaling": {"kind": "keda"},
    "monitoring": {"podMonitor": {"enabled": True}},
}
ROLES = [f"kvferry-{pool}-{role}" for pool in ("chat", "code") for role in ("prefill", "decode")]


def settings(objects: Objects, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    argv, env = container_command(objects, name)
    with monkeypatch.context() as patch:
        for key, value in env.items():
            patch.setenv(key, value)
        return kvferry.commands[argv[1]].make_context(argv[1], argv[2:]).params


def test_a_router_serves_all_models_and_nodes_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = chart(**POOLS)
    assert of_kind(objects, "Deployment").keys() == {*ROLES, "kvferry-router", "kvferry-redis"}
    router = settings(objects, "kvferry-router", monkeypatch)
    assert router["model"] == ("/models/chat", "/images/code/model")
    assert router["served_model_name"] == ("org/chat,chat", "code")
    assert RouterSettings(**{name: router[name] for name in ("model", "served_model_name")})
    for name in ROLES:
        node = settings(objects, name, monkeypatch)
        mine = 0 if "chat" in name else 1
        assert node["model"] == router["model"][mine]
        assert node["served_model_name"] == (router["served_model_name"][mine],)
    assert settings(objects, "kvferry-chat-decode", monkeypatch)["max_num_seqs"] == 128
    assert settings(objects, "kvferry-code-decode", monkeypatch)["max_num_seqs"] == 64
    assert settings(objects, "kvferry-code-prefill", monkeypatch)["max_model_len"] == 4096


def test_what_a_pool_differs_in_is_its_own() -> None:
    objects = chart(**POOLS)
    specs = pod_specs(objects)
    limits = {name: specs[name]["containers"][0]["resources"]["limits"] for name in ROLES}
    assert [limits[name].get("nvidia.com/gpu") for name in ROLES] == [1, 1, None, None]
    scaled = of_kind(objects, "ScaledObject")
    assert scaled.keys() == {*ROLES, "kvferry-router"}
    assert [scaled[name]["spec"]["minReplicaCount"] for name in ROLES] == [0, 3, 0, 0]
    for name in ROLES:
        for trigger in scaled[name]["spec"]["triggers"]:
            model = "org/chat" if "chat" in name else "code"
            query = trigger["metadata"]["query"]
            assert query.count(f'namespace="kvferry",model_name="{model}"') == query.count("kvferry_")
    assert "model_name" not in json.dumps(scaled["kvferry-router"])


@pytest.mark.parametrize("version", ["1.33", "1.36", "1.37"])
def test_objects_fit_the_schema(version: str) -> None:
    """The first that has image volumes switched on, and those of today."""
    for item in own(chart(**POOLS)):
        check_object(item, version)


def test_selectors_keep_pools_apart() -> None:
    objects = chart(**POOLS)
    pods = pod_labels(objects)
    for kind in ("Deployment", "PodDisruptionBudget", "Service"):
        for name, item in of_kind(objects, kind).items():
            selector = item["spec"]["selector"]
            assert selected({"matchLabels": selector} if kind == "Service" else selector, pods) == [name]
    (workers,) = [item for name, item in of_kind(objects, "NetworkPolicy").items() if name.endswith("-workers")]
    assert selected(workers["spec"]["podSelector"], pods) == [name for name in pods if name in ROLES]


def mounts(spec: Manifest) -> set[str]:
    return {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


def test_pods_mount_the_models_that_they_read() -> None:
    objects = chart(**POOLS)
    specs = pod_specs(objects)
    for name in ("kvferry-router", *ROLES):
        volumes = {volume["name"] for volume in specs[name]["volumes"]}
        used = [
            mount["name"]
            for container in (*specs[name].get("initContainers", ()), *specs[name]["containers"])
            for mount in container["volumeMounts"]
        ]
        assert volumes == set(used)
        assert ("/images/code" in mounts(specs[name])) == ("chat" not in name)
        waits = [each["name"] for each in specs[name].get("initContainers", ())]
        assert waits == ([] if "-code-" in name else ["model-chat"])
    (image,) = [volume for volume in specs["kvferry-code-decode"]["volumes"] if "image" in volume]
    assert image["image"] == {"reference": "example.org/models/code:1"}
    jobs = of_kind(objects, "Job")
    assert len(jobs) == 1
    assert next(iter(jobs)).startswith("kvferry-chat-model-")
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for spec in specs.values():
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            for source in container.get("envFrom", ()):
                assert ("ConfigMap", source["configMapRef"]["name"]) in there


def test_the_example_is_of_two_kinds_of_machines() -> None:
    objects = chart(examples=("pools",))
    specs = pod_specs(objects)
    images = {name: specs[f"kvferry-{name}-decode"]["containers"][0]["image"] for name in ("chat", "small")}
    assert images == {"chat": "kvferry/worker:2026.11-cuda", "small": "kvferry/worker:2026.11"}
    fetched = [item["data"] for name, item in of_kind(objects, "ConfigMap").items() if "MODEL_DIR" in item["data"]]
    assert {each["MODEL_REPOSITORY"] for each in fetched} == {"Qwen/Qwen2.5-7B-Instruct", "s3://models/qwen3-0.6b"}
    deadlines = {
        name: item["spec"].get("progressDeadlineSeconds") for name, item in of_kind(objects, "Deployment").items()
    }
    assert deadlines["kvferry-router"] == deadlines["kvferry-chat-decode"] == 4500, "routers wait for all models"
    assert deadlines["kvferry-small-decode"] == 1500
    (secret,) = [
        source["secretRef"]["name"]
        for name, item in of_kind(objects, "Job").items()
        for source in item["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        if "secretRef" in source
    ]
    assert secret == "s3"


def test_another_pool_rolls_no_worker_of_this_one() -> None:
    both, one = chart(**POOLS), chart(**{**POOLS, "pools": [CHAT]})
    for name in ROLES[:2]:
        assert of_kind(both, "Deployment")[name] == of_kind(one, "Deployment")[name]
    routers = [of_kind(each, "Deployment")["kvferry-router"] for each in (both, one)]
    assert routers[0] != routers[1]


def test_pools_of_hpa_select_metrics_by_model() -> None:
    objects = chart(**{**POOLS, "autoscaling": {"kind": "hpa"}, "pools": [CODE]})
    for name in ROLES[2:]:
        for metric in of_kind(objects, "HorizontalPodAutoscaler")[name]["spec"]["metrics"]:
            assert metric["external"]["metric"]["selector"] == {"matchLabels": {"model_name": "code"}}


def test_scrapes_tell_the_nodes_model() -> None:
    """As routers' `/targets` do: nodes do not say it in their metrics."""
    objects = chart(**POOLS)
    for name in ROLES:
        annotations = of_kind(objects, "Deployment")[name]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["kvferry/model"] == ("org/chat" if "chat" in name else "code")
    (monitor,) = of_kind(objects, "PodMonitor").values()
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        labels = {rule.get("targetLabel"): rule for rule in endpoint["relabelings"]}
        assert labels["model_name"]["sourceLabels"] == ["__meta_kubernetes_pod_annotation_kvferry_model"]


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ([{**CHAT, "model": {"name": "/models/chat"}}], "model.servedName"),
        ([CHAT, {**CODE, "model": {**CODE["model"], "servedName": "chat"}}], "two models are called chat"),
        ([{**CHAT, "name": "Chat"}], "/pools/0/name"),
        ([{**CHAT, "model": {**CHAT["model"], "volume": {"enabled": False}}}], "/pools/0/model"),
        ([{**CHAT, "redis": {}}], "redis"),
        ([{**CODE, "model": {**CODE["model"], "name": "/elsewhere"}}], "a path under /models or /images/code"),
        (
            [
                CODE,
                {"name": "b", "model": {**CODE["model"], "servedName": "b", "image": OTHER}},
            ],
            "two images are mounted at /images/code",
        ),
        ([{**CHAT, "model": {**CHAT["model"], "servedName": "a b"}}], "servedName"),
    ],
)  # fmt: skip
def test_wrong_pools_are_refused_by_name(pools: list[Any], told: str) -> None:
    assert told in refusal(**{**POOLS, "pools": pools})


def test_names_of_metrics_that_no_selector_takes_are_refused() -> None:
    assert "model_name=org/chat" in refusal(**{**POOLS, "autoscaling": {"kind": "hpa"}})


def test_long_names_fit() -> None:
    long = "a-release-of-fifty-three-characters-which-is-the-most"
    objects = chart(long, **{**POOLS, "pools": [{**CODE, "name": "twenty-characters-xy"}]})
    assert max(len(name) for kind in ("Service", "Deployment") for name in of_kind(objects, kind)) <= 63
