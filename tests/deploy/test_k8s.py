"""The overlays: valid for Kubernetes, and right about the processes they start."""

from __future__ import annotations

import re
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from cli.main import kvferry
from cli.options import ENV_PREFIX, variable
from tests.deploy.binaries import ROOT
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.manifests import (
    IMAGES,
    OVERLAYS,
    PROCESSES,
    Manifest,
    docker_file,
    manifest_command,
    of_kind,
    pod_spec,
    render,
)

WORKERS = PROCESSES[1:]
SPARE_S = 15
MIN_DRAIN_S = 60
KUBERNETES_VERSIONS = ("1.32", "1.37")


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parsed(deployment: str, overlay: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that the container's own command line makes of its argv and environment."""
    argv, env = manifest_command(deployment, overlay, {"metadata.name": "pod-7", "status.podIP": "10.1.2.3"})
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return kvferry.commands[argv[1]].make_context(argv[1], argv[2:]).params


def seconds(probe: Manifest) -> float:
    return float(probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10))


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_object_fits_the_schema(overlay: str, version: str) -> None:
    objects = render(overlay)
    assert len(objects) >= 15
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_a_wrong_field_would_be_noticed(overlay: str) -> None:
    item = dict(of_kind(render(overlay), "Deployment")["kvferry-router"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**item, "spec": {**item["spec"], "replica": 2}}, "1.37", strict=True)


def test_objects_are_unique_named_for_the_project_and_in_its_namespace(overlay: str) -> None:
    objects = render(overlay)
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(keys)) == len(keys)
    for item in objects:
        assert item["metadata"]["name"].startswith("kvferry")
        if item["kind"] != "Namespace":
            assert item["metadata"]["namespace"] == "kvferry"


def test_the_command_line_accepts_flags_and_variables(
    overlay: str, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parsed(process, overlay, monkeypatch)
    assert settings["host"] == "0.0.0.0"
    assert settings["redis_url"] == "redis://kvferry-redis:6379/0"
    if process in WORKERS:
        assert settings["node_id"] == "pod-7"
        assert settings["advertise_host"] == "10.1.2.3"


def test_every_variable_is_a_setting_of_some_process(overlay: str) -> None:
    known = {
        variable(option.name)
        for command in kvferry.commands.values()
        for option in command.params
        if isinstance(option, click.Option) and option.name
    }
    for process in PROCESSES:
        _, env = manifest_command(process, overlay)
        assert {name for name in env if name.startswith(ENV_PREFIX)} <= known


def test_a_wrong_flag_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        kvferry.commands["router"].make_context("router", ["--max-in-flight=3"])


def test_ports_of_flags_probes_services_and_annotations_agree(
    overlay: str, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parsed(process, overlay, monkeypatch)
    container = pod_spec(overlay, process)["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == settings["port"] != 0
    assert ports.get("link", 0) == settings.get("link_port", 0)
    assert ("link" in ports) == (process in WORKERS)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    service = of_kind(render(overlay), "Service")[process]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == set(ports)
    deployment = of_kind(render(overlay), "Deployment")[process]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"])


def test_selectors_find_exactly_their_pods(overlay: str) -> None:
    objects = render(overlay)
    deployments = of_kind(objects, "Deployment")
    pods = {name: item["spec"]["template"]["metadata"]["labels"].items() for name, item in deployments.items()}
    for kind, selector in (
        ("Deployment", lambda item: item["spec"]["selector"]["matchLabels"]),
        ("PodDisruptionBudget", lambda item: item["spec"]["selector"]["matchLabels"]),
        ("Service", lambda item: item["spec"]["selector"]),
    ):
        for name, item in of_kind(objects, kind).items():
            assert [pod for pod, labels in pods.items() if selector(item).items() <= labels] == [name]


def test_what_a_pod_refers_to_exists(overlay: str) -> None:
    objects = render(overlay)
    accounts, claims = of_kind(objects, "ServiceAccount"), of_kind(objects, "PersistentVolumeClaim")
    for name in of_kind(objects, "Deployment"):
        spec = pod_spec(overlay, name)
        assert spec["serviceAccountName"] in accounts
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
    _, env = manifest_command("kvferry-router", overlay)
    host = re.fullmatch(r"redis://([\w-]+):(\d+)/0", env["KVFERRY_REDIS_URL"])
    assert host
    service = of_kind(objects, "Service")[host[1]]
    assert [port["port"] for port in service["spec"]["ports"]] == [int(host[2])]


def test_service_links_are_off(overlay: str) -> None:
    """With them, a Service `kvferry-x` sets KVFERRY_X_PORT=tcp://…, and names of settings may be among those."""
    for name in of_kind(render(overlay), "Deployment"):
        assert pod_spec(overlay, name)["enableServiceLinks"] is False


def test_grace_periods_fit_what_a_process_does_after_sigterm(
    overlay: str, process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parsed(process, overlay, monkeypatch)
    spec = pod_spec(overlay, process)
    hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = settings["drain_timeout" if process in WORKERS else "request_timeout"]
    assert spec["terminationGracePeriodSeconds"] >= hook + drain + SPARE_S
    assert hook + drain >= MIN_DRAIN_S, "open requests need time to finish"


def test_probes_use_the_right_door_and_leave_time_to_load(overlay: str, process: str) -> None:
    container = pod_spec(overlay, process)["containers"][0]
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert seconds(container["startupProbe"]) >= (600 if process in WORKERS else 60)
    assert seconds(container["livenessProbe"]) >= 30


def test_pods_meet_the_restricted_standard(overlay: str) -> None:
    for name in of_kind(render(overlay), "Deployment"):
        spec = pod_spec(overlay, name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_pods_run_as_the_user_of_their_image(overlay: str, process: str) -> None:
    spec = pod_spec(overlay, process)
    context = spec["securityContext"]
    user = read_dockerfile(docker_file(spec["containers"][0]["image"])).user
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_images_are_ours_or_pinned(overlay: str) -> None:
    for name in of_kind(render(overlay), "Deployment"):
        image, _, tag = pod_spec(overlay, name)["containers"][0]["image"].partition(":")
        assert tag not in ("", "latest")
        assert image in IMAGES or image == "valkey/valkey"


def test_resources_are_asked_for_and_memory_is_bounded(overlay: str) -> None:
    for name in of_kind(render(overlay), "Deployment"):
        resources = pod_spec(overlay, name)["containers"][0]["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert "memory" in resources["limits"]


def test_workers_have_shared_memory_for_ucx(overlay: str) -> None:
    for name in WORKERS:
        spec = pod_spec(overlay, name)
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        volume = next(volume for volume in spec["volumes"] if volume["name"] == mounts["/dev/shm"])
        assert volume["emptyDir"]["medium"] == "Memory"


def test_only_the_gpu_overlay_asks_for_gpus() -> None:
    for name in WORKERS:
        cpu, gpu = (pod_spec(overlay, name)["containers"][0]["resources"]["limits"] for overlay in OVERLAYS)
        assert "nvidia.com/gpu" not in cpu
        assert gpu["nvidia.com/gpu"] == 1
    router = pod_spec("gpu", "kvferry-router")["containers"][0]
    assert "nvidia.com/gpu" not in router["resources"]["limits"]


def test_gpu_processes_find_the_model_under_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    for process in PROCESSES:
        with monkeypatch.context() as patch:
            settings = parsed(process, "gpu", patch)
        mounts = [mount["mountPath"] for mount in pod_spec("gpu", process)["containers"][0]["volumeMounts"]]
        (model,) = [settings["model"]] if isinstance(settings["model"], str) else settings["model"]
        assert any(model.startswith(mount + "/") for mount in mounts)
        assert settings.get("device", "cuda") == "cuda"


def test_every_pool_scales_on_its_own_metric_and_the_adapter_serves_it(overlay: str) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml").read_text())["rules"]
    served = {rule["name"]["as"] for rule in rules}
    scalers = of_kind(render(overlay), "HorizontalPodAutoscaler")
    assert set(scalers) == set(PROCESSES)
    used: set[str] = set()
    for name, scaler in scalers.items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        metrics = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
        assert metrics
        assert not metrics & used
        used |= metrics
    assert used == served


def test_replicas_are_left_to_the_autoscalers(overlay: str) -> None:
    deployments = of_kind(render(overlay), "Deployment")
    for name in of_kind(render(overlay), "HorizontalPodAutoscaler"):
        assert "replicas" not in deployments[name]["spec"]


def test_decode_scales_before_its_batch_is_full(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parsed("kvferry-decode", overlay, monkeypatch)
    scaler = of_kind(render(overlay), "HorizontalPodAutoscaler")["kvferry-decode"]
    targets = {item["pods"]["metric"]["name"]: item["pods"]["target"] for item in scaler["spec"]["metrics"]}
    assert int(targets["kvferry_requests_running"]["averageValue"]) < settings["max_num_seqs"]
