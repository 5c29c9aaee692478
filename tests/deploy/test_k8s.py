"""Every way of installing: objects that Kubernetes takes, find each other, and are let in by policies and quotas."""

from __future__ import annotations

import json
from collections.abc import Iterator

import kubernetes_validate
import pytest
import yaml

from tests.deploy.binaries import ROOT
from tests.deploy.installations import INSTALLATIONS, UNRESTRICTED, own
from tests.deploy.kubernetes_schemas import check_object
from tests.deploy.manifests import (
    ENGINE_IMAGES,
    IMAGES,
    OVERLAYS,
    PROCESSES,
    Manifest,
    Objects,
    containers,
    of_kind,
    pod_specs,
    render,
)

WORKERS = PROCESSES[1:]
KUBERNETES_VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
Labels = dict[str, str]


@pytest.fixture(params=INSTALLATIONS)
def installation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(installation: str) -> Objects:
    return INSTALLATIONS[installation]()


def our_containers(objects: Objects) -> list[Manifest]:
    return [container for spec in pod_specs(objects).values() for container in containers(spec)]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_object_fits_the_schema(version: str) -> None:
    """Each once, however many ways of installing have it."""
    found = {json.dumps(item, sort_keys=True) for made in INSTALLATIONS.values() for item in own(made())}
    assert len(found) >= 80
    for text in sorted(found):
        check_object(json.loads(text), version)


def test_a_wrong_field_would_be_noticed(objects: Objects) -> None:
    item = dict(of_kind(objects, "Deployment")["kvferry-router"])
    with pytest.raises(kubernetes_validate.ValidationError):
        check_object({**item, "spec": {**item["spec"], "replica": 2}}, "1.37")


def test_objects_are_unique_named_for_the_project_and_in_its_namespace(objects: Objects) -> None:
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(keys)) == len(keys)
    for item in objects:
        assert item["metadata"]["name"].startswith("kvferry")
        if item["kind"] != "Namespace":
            assert item["metadata"].get("namespace", "kvferry") == "kvferry"


def pod_labels(objects: Objects) -> dict[str, Labels]:
    return {
        name: item["spec"]["template"]["metadata"]["labels"] for name, item in of_kind(objects, "Deployment").items()
    }


def selected(selector: Manifest, pods: dict[str, Labels]) -> list[str]:
    """Names of the pods that a label selector finds."""
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return [
        name
        for name, labels in pods.items()
        if selector.get("matchLabels", {}).items() <= labels.items()
        and all(labels.get(each["key"]) in each["values"] for each in expressions)
    ]


def test_selectors_find_exactly_their_pods(objects: Objects) -> None:
    pods = pod_labels(objects)
    for kind in ("Deployment", "PodDisruptionBudget", "Service"):
        for name, item in of_kind(objects, kind).items():
            selector = item["spec"]["selector"]
            assert selected({"matchLabels": selector} if kind == "Service" else selector, pods) == [name]
    for name, spec in pod_specs(objects).items():
        for constraint in spec.get("topologySpreadConstraints", ()):
            assert constraint["matchLabelKeys"] == ["pod-template-hash"], "old pods would push new ones together"
            assert selected(constraint["labelSelector"], pods) == [name]


def references(spec: Manifest) -> Iterator[tuple[str, str]]:
    """Kind and name of what a pod cannot start without, Secrets left out: those are for people to make."""
    yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
    for container in containers(spec):
        for source in container.get("envFrom", ()):
            yield "ConfigMap", source["configMapRef"]["name"]


def test_what_a_pod_refers_to_exists(objects: Objects) -> None:
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for spec in pod_specs(objects).values():
        assert set(references(spec)) <= there
        mounted = {mount["name"] for container in containers(spec) for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_service_links_are_off(objects: Objects) -> None:
    """With them, a Service `kvferry-x` sets KVFERRY_X_PORT=tcp://…, and names of settings may be among those."""
    assert all(spec["enableServiceLinks"] is False for spec in pod_specs(objects).values())


def test_pods_meet_the_restricted_standard(objects: Objects, installation: str) -> None:
    allowed = [{"drop": ["ALL"]}]
    if installation in UNRESTRICTED:
        allowed.append({"drop": ["ALL"], "add": ["IPC_LOCK"]})
    for spec in pod_specs(objects).values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {kind for volume in spec["volumes"] for kind in volume} - {"name"}
        assert kinds <= {"emptyDir", "ephemeral", "secret", "configMap", "persistentVolumeClaim"}
    for container in our_containers(objects):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] in allowed


def test_images_are_ours_or_pinned(objects: Objects) -> None:
    for container in our_containers(objects):
        image, _, tag = container["image"].rpartition(":")
        assert tag not in ("", "latest")
        assert image.startswith("example.org/") or image.endswith((*IMAGES, *ENGINE_IMAGES, "valkey/valkey"))


def test_a_quota_lets_every_container_in(objects: Objects) -> None:
    """A quota of CPU and memory refuses pods of which one container does not say how much it takes at most."""
    for container in our_containers(objects):
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][kind]), container["name"]


def test_workers_have_shared_memory_for_ucx(objects: Objects) -> None:
    for name in WORKERS:
        spec = pod_specs(objects)[name]
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        volume = next(volume for volume in spec["volumes"] if volume["name"] == mounts["/dev/shm"])
        assert volume["emptyDir"]["medium"] == "Memory"


def test_only_the_gpu_overlay_asks_for_gpus() -> None:
    for name in WORKERS:
        cpu, gpu = (pod_specs(render(each))[name]["containers"][0]["resources"]["limits"] for each in OVERLAYS)
        assert "nvidia.com/gpu" not in cpu
        assert gpu["nvidia.com/gpu"] == 1
    router = pod_specs(render("gpu"))["kvferry-router"]["containers"][0]
    assert "nvidia.com/gpu" not in router["resources"]["limits"]


def test_only_members_reach_workers_and_redis(objects: Objects) -> None:
    """Clients reach routers alone; from outside the cluster's pods, Prometheus reaches HTTP ports, where the secret is
    asked for. Nothing reaches Redis from other namespaces."""
    pods, policies = pod_labels(objects), of_kind(objects, "NetworkPolicy")
    engines = [name for name, labels in pods.items() if labels["app.kubernetes.io/component"] == "engine"]
    guarded = {each: item for item in policies.values() for each in selected(item["spec"]["podSelector"], pods)}
    assert set(guarded) == set(pods)
    for name, labels in pods.items():
        if name == "kvferry-router":
            continue
        open_ports = {port["containerPort"] for port in pod_specs(objects)[name]["containers"][0]["ports"]}
        if name in engines:
            assert_only_routers_reach_adapters(guarded[name], pods, open_ports)
            continue
        members = [*PROCESSES, *engines] if name == "kvferry-redis" else [*PROCESSES]
        for rule in guarded[name]["spec"]["ingress"]:
            assert rule["from"]
            for peer in rule["from"]:
                ports = {port["port"] for port in rule["ports"]}
                if "podSelector" in peer:
                    assert "namespaceSelector" not in peer
                    assert selected(peer["podSelector"], pods) == sorted(members, key=list(pods).index)
                    assert open_ports <= ports, labels
                else:
                    assert ports == {9000, 9001}
                    assert name in WORKERS


def assert_only_routers_reach_adapters(policy: Manifest, pods: dict[str, Labels], open_ports: set[int]) -> None:
    """Besides, Prometheus; and engines each other where they hand over blocks, whose ports they choose."""
    routers, scrapers, *others = policy["spec"]["ingress"]
    assert [selected(peer["podSelector"], pods) for peer in routers["from"]] == [["kvferry-router"]]
    assert all("podSelector" not in peer for peer in scrapers["from"])
    for rule in (routers, scrapers):
        assert {port["port"] for port in rule["ports"]} == open_ports
    for rule in others:
        (peer,) = rule["from"]
        assert set(selected(peer["podSelector"], pods)) == {name for name in pods if "-engine-" in name}


def test_budgets_let_one_pod_go_at_a_time(objects: Objects) -> None:
    for item in of_kind(objects, "PodDisruptionBudget").values():
        assert item["spec"]["maxUnavailable"] == 1
    assert "kvferry-router" in of_kind(objects, "PodDisruptionBudget")


def test_services_take_both_families(objects: Objects) -> None:
    for item in of_kind(objects, "Service").values():
        assert item["spec"]["ipFamilyPolicy"] in ("PreferDualStack", "RequireDualStack")


def test_replicas_are_left_to_the_autoscalers(objects: Objects) -> None:
    deployments = of_kind(objects, "Deployment")
    scaled = {**of_kind(objects, "HorizontalPodAutoscaler"), **of_kind(objects, "ScaledObject")}
    assert set(scaled) in (set(), set(PROCESSES))
    for name in PROCESSES:
        assert ("replicas" in deployments[name]["spec"]) == (name not in scaled)
        if name in scaled:
            assert scaled[name]["spec"]["scaleTargetRef"]["name"] == name


def test_decode_starts_with_two_pods() -> None:
    for overlay in OVERLAYS:
        assert of_kind(render(overlay), "HorizontalPodAutoscaler")["kvferry-decode"]["spec"]["minReplicas"] >= 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pool_scales_on_its_own_metric_and_the_adapter_serves_it(overlay: str) -> None:
    adapter = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml").read_text())
    served = {rule["name"]["as"] for kind in ("rules", "externalRules") for rule in adapter.get(kind, ())}
    scalers = of_kind(render(overlay), "HorizontalPodAutoscaler")
    used = [
        metric[metric["type"].lower()]["metric"]["name"]
        for scaler in scalers.values()
        for metric in scaler["spec"]["metrics"]
    ]
    assert len(set(used)) == len(used)
    assert set(used) == served
