"""The processes that every way of installing starts: argv and environment are what the command line takes, and probes,
grace and ports are right about what runs."""

from __future__ import annotations

import re
from typing import Any

import click
import httpx
import pytest

from kvferry.cli.main import kvferry
from kvferry.cli.options import ENV_PREFIX, variable
from kvferry.cluster_state import redis_url
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import make_app, serve_metrics
from tests.api_parts import Api, FakeCluster, says
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.installations import INSTALLATIONS
from tests.deploy.manifests import (
    PROCESSES,
    SECRET,
    Manifest,
    Objects,
    container_command,
    docker_file,
    of_kind,
    pod_specs,
)

WORKERS = PROCESSES[1:]
SPARE_S = 15
MIN_DRAIN_S = 60
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
REPLACED_S = 70
"""A process that hangs is killed by then."""


@pytest.fixture(params=INSTALLATIONS)
def installation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(installation: str) -> Objects:
    return INSTALLATIONS[installation]()


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def container(objects: Objects, process: str) -> Manifest:
    found: Manifest = pod_specs(objects)[process]["containers"][0]
    return found


@pytest.fixture
def settings(objects: Objects, process: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the container's own command line makes of its argv and environment."""
    argv, env = container_command(objects, process, {"metadata.name": "pod-7", "status.podIP": "10.1.2.3"})
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return kvferry.commands[argv[1]].make_context(argv[1], argv[2:]).params


def mounts(container: Manifest) -> list[str]:
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_command_line_accepts_flags_and_variables(process: str, settings: dict[str, Any]) -> None:
    assert settings["host"] in ("0.0.0.0", "::")
    if process in WORKERS:
        assert settings["node_id"] == "pod-7"
        assert settings["advertise_host"] == "10.1.2.3"


def test_every_variable_is_a_setting_of_some_process(objects: Objects, process: str) -> None:
    known = {
        variable(option.name)
        for command in kvferry.commands.values()
        for option in command.params
        if isinstance(option, click.Option) and option.name
    }
    _, env = container_command(objects, process)
    assert {name for name in env if name.startswith(ENV_PREFIX)} <= known


def test_a_wrong_flag_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        kvferry.commands["router"].make_context("router", ["--max-in-flight=3"])


def test_files_of_settings_are_under_a_mount(container: Manifest, settings: dict[str, Any]) -> None:
    """Files of Secrets, and the model where it is no name of ours."""
    models = [settings["model"]] if isinstance(settings["model"], str) else settings["model"]
    names = ("redis_password_file", "api_keys", "ssl_certfile", "ssl_keyfile")
    files = [settings[name] for name in names if settings.get(name)] + [name for name in models if name != "smollm2"]
    files += re.findall(r"[?&]ssl_ca_certs=([^&]+)", settings["redis_url"])
    for path in files:
        assert any(path.startswith(mount + "/") for mount in mounts(container)), path


def test_redis_is_there_and_asks_for_a_password(
    objects: Objects, container: Manifest, settings: dict[str, Any]
) -> None:
    if settings["redis_url"] == SECRET:  # a URL with a password, of a Secret
        return
    url = redis_url.read(settings["redis_url"].partition("?")[0])
    assert url.server["username"] == "kvferry"
    assert settings["redis_password_file"]
    services = of_kind(objects, "Service")
    if not url.sentinels:
        assert [port["port"] for port in services[url.server["host"]]["spec"]["ports"]] == [url.server["port"]]


def test_no_secret_is_in_a_config_map_or_left_out_in_silence(objects: Objects) -> None:
    """A Secret that is lost keeps pods from starting; only the hub's token, which opens nothing here, may be."""
    for item in of_kind(objects, "ConfigMap").values():
        assert not redis_url.has_password(item["data"].get("KVFERRY_REDIS_URL", "").replace("kvferry@", ""))
    for spec in pod_specs(objects).values():
        for volume in spec["volumes"]:
            assert "optional" not in volume.get("secret", {})
        for container in spec["containers"]:
            for entry in container.get("env", ()):
                source = entry.get("valueFrom", {}).get("secretKeyRef", {})
                assert not source.get("optional") or entry["name"] == "HF_TOKEN"


def test_ports_of_flags_probes_services_and_annotations_agree(
    objects: Objects, process: str, container: Manifest, settings: dict[str, Any]
) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == settings["port"] != 0
    assert ports.get("link", 0) == settings.get("link_port", 0)
    assert ("link" in ports) == (process in WORKERS)
    for probe in PROBES:
        assert container[probe]["httpGet"]["port"] in ports
        assert (container[probe]["httpGet"].get("scheme") == "HTTPS") == bool(settings.get("ssl_certfile"))
    service = of_kind(objects, "Service")[process]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == set(ports)
    annotations = of_kind(objects, "Deployment")[process]["spec"]["template"]["metadata"]["annotations"]
    assert annotations.get("prometheus.io/port", str(ports["http"])) == str(ports["http"])
    assert "prometheus.io/port" in annotations or of_kind(objects, "PodMonitor")


def test_grace_periods_fit_what_a_process_does_after_sigterm(
    objects: Objects, process: str, container: Manifest, settings: dict[str, Any]
) -> None:
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = settings["drain_timeout" if process in WORKERS else "request_timeout"]
    assert pod_specs(objects)[process]["terminationGracePeriodSeconds"] >= hook + drain + SPARE_S
    assert hook + drain >= MIN_DRAIN_S, "open requests need time to finish"


def test_a_rollout_is_not_called_stuck_while_a_model_loads(objects: Objects, process: str, container: Manifest) -> None:
    """Ten minutes are Kubernetes' default; `helm --wait` and `kubectl rollout status` fail then."""
    worker = pod_specs(objects)["kvferry-decode"]["containers"][0]["startupProbe"]
    loading = worker["failureThreshold"] * worker["periodSeconds"]
    leaving = pod_specs(objects)[process]["terminationGracePeriodSeconds"] if process in WORKERS else 0
    assert of_kind(objects, "Deployment")[process]["spec"]["progressDeadlineSeconds"] >= loading + leaving


def test_probes_use_the_right_door_and_leave_time_to_load(installation: str, process: str, container: Manifest) -> None:
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    loading = 3600 if installation in ("gpu", "gpu-rdma", "chart-production", "chart-rdma") else 600
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= (loading if process in WORKERS else 60)


async def test_the_doors_of_probes_and_scrapes_exist() -> None:
    """Whatever they answer there: a door that is none answers 404."""
    node = make_app(lambda: (200, {}), lambda: "it joins", lambda: (SECRET,))
    serve_metrics(node, WorkerMetrics("decode").registry, lambda: None)
    apps = {name: node for name in WORKERS} | {PROCESSES[0]: Api(FakeCluster(says("x"))).app}
    for name, app in apps.items():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as client:
            for path in doors(name):
                assert (await client.get(path)).status_code in (200, 503), (name, path)
            assert (await client.get("/nowhere")).status_code in (401, 403, 404)


def doors(process: str) -> set[str]:
    """Paths that Kubernetes and Prometheus ask, in whatever installation."""
    found = {"/metrics"}
    for made in INSTALLATIONS.values():
        container = pod_specs(made())[process]["containers"][0]
        found |= {container[probe]["httpGet"]["path"] for probe in PROBES}
    return found


def test_a_process_that_hangs_is_replaced_soon_and_a_busy_one_is_not(objects: Objects) -> None:
    """The last answer came just before it hung; then a period passes, and each look waits for its answer. The pod's own
    grace, for draining, is no use to a process that hangs."""
    for name, spec in pod_specs(objects).items():
        for probe in [each["livenessProbe"] for each in spec["containers"] if "livenessProbe" in each]:
            assert probe["timeoutSeconds"] <= probe["periodSeconds"], "looks would come later than this counts"
            noticed = probe["failureThreshold"] * probe["periodSeconds"] + probe["timeoutSeconds"]
            assert noticed + probe["terminationGracePeriodSeconds"] <= REPLACED_S, name
            assert probe["failureThreshold"] * probe["periodSeconds"] >= 30
    assert all("livenessProbe" in pod_specs(objects)[name]["containers"][0] for name in PROCESSES)


def test_pods_run_as_the_user_of_their_image(objects: Objects, process: str, container: Manifest) -> None:
    context = pod_specs(objects)[process]["securityContext"]
    user = read_dockerfile(docker_file(container["image"])).user
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_every_process_of_the_cluster_needs_its_secret_and_sees_it_change(
    objects: Objects, process: str, container: Manifest, settings: dict[str, Any]
) -> None:
    """A variable would keep what it was at the start."""
    assert not settings["cluster_secret"]
    folder, _, file = settings["cluster_secret_file"].rpartition("/")
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == folder)
    assert "subPath" not in mount, "such files are never renewed"
    (volume,) = (each for each in pod_specs(objects)[process]["volumes"] if each["name"] == mount["name"])
    assert [item["path"] for item in volume["secret"]["items"]] == [file]
    assert not volume["secret"].get("optional")
