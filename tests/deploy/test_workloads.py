"""What makes the workers' pods in place of Deployments, and what gateways may send to in place of a Service."""

from __future__ import annotations

import copy
import os
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy import crds
from tests.deploy.charts import chart, refusal
from tests.deploy.kubernetes_schemas import check_object
from tests.deploy.manifests import OVERLAYS, Manifest, Objects, of_kind, pod_specs, render
from tests.deploy.test_pools import POOLS

ROLES = ("prefill", "decode")
KINDS = ("LeaderWorkerSet", "DisaggregatedSet", "LLMInferenceService")
PICKED = {"enabled": True, "endpointPicker": {"name": "picker"}}
GATE = {"enabled": True, "parentRefs": [{"name": "gate"}]}


def installed(kind: str, **values: Any) -> Objects:
    return chart(**{**values, "worker": {"workload": kind, **values.get("worker", {})}})


def custom(objects: Objects) -> list[Manifest]:
    return [item for item in objects if item["apiVersion"].partition("/")[0] in crds.GROUPS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaling", ["hpa", "keda", "none"])
def test_they_fit_their_schemas(kind: str, scaling: str) -> None:
    for values in ({}, POOLS):
        objects = installed(kind, **{**values, "autoscaling": {"kind": "none" if values else scaling}})
        made = custom(objects)
        assert len(made) == (2 if values else 1) * (2 if kind == "LeaderWorkerSet" else 1)
        for item in made:
            crds.check(item)
        assert {
            name for name in of_kind(objects, "Deployment") if "router" not in name and "redis" not in name
        } == set()


def test_crds_that_are_given_are_of_these_kinds() -> None:
    if crds.FOLDER not in os.environ:
        pytest.skip(
            f"{crds.FOLDER} names no folder with the projects' own CRDs: only their description here is checked"
        )
    assert crds.SPECS.keys() <= crds.given().keys()


def test_a_pool_of_routers_fits_and_the_route_names_it() -> None:
    objects = chart(inferencePool=PICKED, httpRoute=GATE)
    (pool,) = custom(objects)
    crds.check(pool)
    labels = pod_specs_labels(objects)["kvferry-router"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (route,) = of_kind(objects, "HTTPRoute").values()
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "kvferry"}
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] == pod_specs(objects)["kvferry-router"]["containers"][0]["ports"][0]["containerPort"]


def pod_specs_labels(objects: Objects) -> dict[str, dict[str, str]]:
    return {
        name: item["spec"]["template"]["metadata"]["labels"] for name, item in of_kind(objects, "Deployment").items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_field_would_be_noticed(kind: str) -> None:
    for item in custom(installed(kind)):
        wrong = copy.deepcopy(item)
        wrong["spec"]["replica"] = 3
        with pytest.raises(jsonschema.ValidationError):
            crds.check(wrong)
        wrong = copy.deepcopy(item)
        next(crds.templates(wrong["spec"]))["spec"]["containers"][0]["imag"] = "x"
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            crds.check(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_those_of_a_deployment(kind: str) -> None:
    """Whatever makes them: but for the name that KServe wants, and the command that it would replace."""
    expected = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]
        for item in of_kind(chart(), "Deployment").values()
    }
    found = [template for item in custom(installed(kind)) for template in crds.templates(item["spec"])]
    assert len(found) == 2
    for template in found:
        role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        spec = template["spec"]
        if kind == "LLMInferenceService":
            assert spec["containers"][0].pop("name") == "main"
            assert spec["containers"][0].pop("command") == ["tini", "--", "kvferry"]
            spec["containers"][0]["name"] = role
        assert template == expected[role]


@pytest.mark.parametrize("scaling", ["hpa", "keda"])
def test_autoscalers_find_what_they_scale(scaling: str) -> None:
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[scaling]
    targets = {"LeaderWorkerSet": "LeaderWorkerSet", "DisaggregatedSet": "DisaggregatedSetRoleScaler"}
    for workload, expected in targets.items():
        objects = installed(workload, autoscaling={"kind": scaling})
        for role in ROLES:
            target = of_kind(objects, kind)[f"kvferry-{role}"]["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) == (expected, f"kvferry-{role}")
        for item in custom(objects):
            roles = item["spec"].get("roles", [item])
            assert all("replicas" not in each["spec"] for each in roles)
            assert all(each.get("scaling", {"mode": "External"}) == {"mode": "External"} for each in roles)
    objects = installed("LLMInferenceService", autoscaling={"kind": scaling})
    assert of_kind(objects, kind).keys() == {"kvferry-router"}
    (config,) = custom(objects)
    assert (config["spec"]["replicas"], config["spec"]["prefill"]["replicas"]) == (2, 1)


def test_a_set_that_cannot_recreate_says_so() -> None:
    told = refusal(
        worker={"workload": "LeaderWorkerSet"}, decode={"strategy": {"type": "Recreate", "rollingUpdate": None}}
    )
    assert "decode.strategy.type: a LeaderWorkerSet rolls" in told
    assert "endpointPicker" in refusal(inferencePool={"enabled": True})


def test_neighbours_are_preferred_in_the_order_of_nearness() -> None:
    near = ["kubernetes.io/hostname", "example.com/rack", "topology.kubernetes.io/zone"]
    for role, other in (ROLES, ROLES[::-1]):
        spec = pod_specs(chart(worker={"nearEachOther": near}))[f"kvferry-{role}"]
        terms = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [(each["weight"], each["podAffinityTerm"]["topologyKey"]) for each in terms] == [
            (100, near[0]), (50, near[1]), (25, near[2]),
        ]  # fmt: skip
        labels = [each["podAffinityTerm"]["labelSelector"]["matchLabels"] for each in terms]
        assert {each["app.kubernetes.io/component"] for each in labels} == {other}


def test_machines_are_chosen_by_gpu_and_driver() -> None:
    values = {"gpus": 1, "gpuNodes": {"products": ["H100", "H200"], "leastDriver": 580}, "nearEachOther": "rack"}
    affinity = pod_specs(chart(worker=values))["kvferry-decode"]["affinity"]
    assert "podAffinity" in affinity
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    rows = [[(each["operator"], *each.get("values", ())) for each in term["matchExpressions"]] for term in terms]
    assert rows == [[("In", "H100", "H200"), ("Gt", "579")], [("In", "H100", "H200"), ("DoesNotExist",)]]
    assert "affinity" not in pod_specs(chart(worker={"gpuNodes": {"leastDriver": 580}}))["kvferry-decode"]
    own = {"nodeAffinity": {}}
    assert pod_specs(chart(worker={"gpus": 1}, decode={"affinity": own}))["kvferry-decode"]["affinity"] == own


def test_a_priority_class_is_that_of_all_pods_that_name_none() -> None:
    objects = chart(priorityClass={"create": True, "value": 7}, prefill={"priorityClassName": "low"})
    (made,) = of_kind(objects, "PriorityClass").values()
    check_object(made, "1.36")
    names = {name: spec.get("priorityClassName") for name, spec in pod_specs(objects).items()}
    assert names == {
        "kvferry-router": "kvferry", "kvferry-decode": "kvferry", "kvferry-redis": "kvferry",
        "kvferry-prefill": "low", "kvferry-test": None,
    }  # fmt: skip


def test_devices_may_be_claimed() -> None:
    claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}], "schedulerName": "kai"}
    objects = chart(decode={**claims, "resources": {"claims": [{"name": "gpu"}]}})
    decode = of_kind(objects, "Deployment")["kvferry-decode"]
    check_object(decode, "1.36")
    spec = decode["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == claims["resourceClaims"]
    assert spec["schedulerName"] == "kai"
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]


HOSTS = {"worker": {"tensorParallelSize": 8}, "decode": {"nnodes": 2}}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_node_may_have_several_pods(kind: str) -> None:
    objects = installed(kind, **{**HOSTS, "worker": {"tensorParallelSize": 8, "gpus": 4}})
    groups = {}
    for item in custom(objects):
        crds.check(item)
        name, roles = item["metadata"]["name"], item["spec"].get("roles")
        groups |= {each["name"]: each["spec"] for each in roles} if roles else {name.split("-")[-1]: item["spec"]}
    for role, size, gpus in (("prefill", 1, 8), ("decode", 2, 4)):
        group = groups[role]["leaderWorkerTemplate"]
        assert (group["size"], group["restartPolicy"]) == (size, "None")
        container = group["workerTemplate"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        told = {"--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"}
        assert told & {*container["args"]} == (told if size == 2 else set())
        assert ("hosts" in {port["name"] for port in container["ports"]}) == (size == 2)


def test_pods_of_a_node_reach_each_other_on_all_ports() -> None:
    def rules(**values: Any) -> list[Any]:
        policy = of_kind(installed("LeaderWorkerSet", **values), "NetworkPolicy")["kvferry-workers"]
        check_object(policy, "1.36")
        return [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]

    ((peers,),) = [rule["from"] for rule in rules(**HOSTS)]
    assert peers["podSelector"]["matchExpressions"] == [
        {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}
    ]
    assert peers["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "kvferry"
    assert rules() == []


def test_hosts_that_cannot_be_are_refused() -> None:
    assert "decode.nnodes: several pods per node need worker.workload" in refusal(**HOSTS)
    told = refusal(worker={"workload": "LeaderWorkerSet", "tensorParallelSize": 3}, prefill={"nnodes": 2})
    assert "prefill.nnodes: 2 does not divide worker.tensorParallelSize 3" in told


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_makes_groups_of_the_pods_of_the_deployment(overlay: str) -> None:
    objects, before = render(overlay, "several-hosts"), render(overlay)
    (group,) = custom(objects)
    crds.check(group)
    assert group["metadata"]["namespace"] == "kvferry"
    assert "kvferry-decode" not in of_kind(objects, "Deployment")
    target = of_kind(objects, "HorizontalPodAutoscaler")["kvferry-decode"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LeaderWorkerSet", group["metadata"]["name"])
    expected = of_kind(before, "Deployment")["kvferry-decode"]["spec"]["template"]
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    container = template["spec"]["containers"][0]
    assert container["args"][-3:] == [
        "--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)",
    ]  # fmt: skip
    assert container["env"].pop() == {"name": "KVFERRY_TENSOR_PARALLEL_SIZE", "value": "2"}
    assert container["ports"].pop() == {"name": "hosts", "containerPort": 29500}
    del container["args"][-3:]
    assert template == expected, "with the same names of ConfigMaps, which kustomize changes"
    policy = of_kind(objects, "NetworkPolicy")["kvferry-workers"]
    check_object(policy, "1.36")
    assert [
        rule["from"][0]["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] if "ports" not in rule
    ] == [{"app.kubernetes.io/name": "kvferry", "leaderworkerset.sigs.k8s.io/name": "kvferry-decode"}]
