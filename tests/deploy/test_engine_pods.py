"""Engines of others in the chart: engine and adapter agree, the engine has what the doctor asks for, and pods drain."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from kvferry.cli import engine_doctor
from kvferry.cli.engines import ENGINES as SERVED_BY_KVFERRY
from kvferry.cli.engines import Start, nixl
from kvferry.model_files.model_name import split_names
from kvferry.protocol.node_settings import AdapterSettings
from tests.deploy.charts import chart
from tests.deploy.engines import EnginePod, engine_pods
from tests.deploy.installations import ENGINES
from tests.deploy.manifests import Objects, of_kind

KINDS = ("vllm", "sglang", "llamacpp")
SPARE_S = 15


@pytest.fixture(scope="module")
def objects() -> Objects:
    return chart(**ENGINES)


@pytest.fixture(params=KINDS)
def pod(objects: Objects, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EnginePod:
    return engine_pods(objects, monkeypatch)[str(request.param)]


def only(monkeypatch: pytest.MonkeyPatch, **values: Any) -> EnginePod:
    """The pod of one group with these values."""
    group = {"name": "one", "image": "vllm/vllm-openai:v0.32.0", **values}
    made = chart(model={"servedName": "m"}, autoscaling={"kind": "none"}, engines=[group])
    return engine_pods(made, monkeypatch)["one"]


def test_an_adapter_is_told_where_its_engine_is(pod: EnginePod) -> None:
    adapter = pod.adapter
    assert adapter["engine"] == pod.name.removeprefix("kvferry-engine-")
    assert adapter["url"] == f"http://127.0.0.1:{pod.after('--port')}"
    assert pod.after("--host") == "127.0.0.1", "it asks for no key"
    assert (adapter["node_id"], adapter["advertise_host"]) == ("pod-7", "10.1.2.3")
    assert adapter["role"] == "decode"
    if adapter["engine"] == "llamacpp":
        assert not adapter["kv_events"]
        return
    assert adapter["kv_events"] == pod.events["endpoint"]
    assert adapter["kv_events_replay"] == pod.events["replay_endpoint"] != pod.events["endpoint"]


def test_values_reach_the_adapter(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: pod.adapter for name, pod in engine_pods(objects, monkeypatch).items()}
    assert [found[kind]["accept_inexact"] for kind in KINDS] == [False, True, False]
    assert [found[kind]["engine_revision"] for kind in KINDS] == ["", "r2", ""]
    assert [found[kind]["drain_timeout"] for kind in KINDS] == [300, 300, 90]
    assert found["sglang"]["log_format"] == "json"


def test_an_adapter_serves_its_own_model_under_the_names_of_the_router(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod in engine_pods(objects, monkeypatch).values():
        names = pod.adapter["served_model_name"]
        assert split_names(AdapterSettings(served_model_name=names).served_model_name, 1) == [("org/chat", "chat")]
        assert pod.after("--alias" if "--alias" in pod.argv else "--served-model-name") == "org/chat"


def test_an_engine_is_started_as_kvferry_serve_starts_it(pod: EnginePod) -> None:
    """Every flag of `kvferry serve` with its value; the chart may have more."""
    kind = pod.adapter["engine"]
    events = {} if kind == "llamacpp" else pod.events
    model = pod.after({"vllm": "--model", "sglang": "--model-path", "llamacpp": "-m"}[kind])
    start = Start(
        model, "org/chat", "127.0.0.1", int(pod.after("--port")), events.get("endpoint", ""),
        events.get("replay_endpoint", ""),
    )  # fmt: skip
    expected = list(SERVED_BY_KVFERRY[kind](pod.argv[0], start))
    for at, word in enumerate(expected):
        if not word.startswith("-"):
            continue
        values = [each for each in expected[at + 1 : at + 2] if not each.startswith("-")]
        if word == "--kv-events-config":
            assert pod.events == json.loads(values[0])
        elif word != "--page-size":  # the installation's own
            assert pod.argv[pod.argv.index(word) + 1 :][: len(values)] == values, word
    assert pod.argv[: len(expected)][: expected.index("--host")] == expected[: expected.index("--host")]


def test_an_engine_has_every_flag_that_the_doctor_would_ask_for(pod: EnginePod) -> None:
    kind = pod.adapter["engine"]
    asked = [engine_doctor.REFUSED[kind], engine_doctor.EVENTS.get(kind, ""), engine_doctor.DETAILS.get(kind, "")]
    words = [word for text in asked for word in shlex.split(text)]
    flags = {word.rstrip(",") for word in words if word.startswith("--")} - {"--disaggregation-mode"}
    assert flags, "the doctor asks for nothing"
    assert flags <= set(pod.argv)
    for wanted in (json.loads(word) for word in words if word.startswith("{")):
        assert wanted.keys() <= pod.events.keys()
        assert {name: pod.events[name] for name in ("enable_kv_cache_events", "publisher") if name in wanted} == {
            name: value for name, value in wanted.items() if "endpoint" not in name
        }


def test_block_size_and_gpus_are_the_values(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = engine_pods(objects, monkeypatch)
    assert pods["vllm"].after("--block-size") == "16"
    assert pods["sglang"].after("--page-size") == "32"
    assert pods["sglang"].after("--tp-size") == "2"
    assert "--tensor-parallel-size" not in pods["vllm"].argv
    limits = [pods[kind].engine["resources"]["limits"] for kind in KINDS]
    assert [each.get("nvidia.com/gpu") for each in limits] == [1, None, None]
    assert limits[1]["example.org/gpu"] == 2
    tolerated = [{each["key"] for each in pods[kind].spec.get("tolerations", ())} for kind in KINDS]
    assert tolerated == [{"nvidia.com/gpu"}, {"llm", "example.org/gpu"}, set()]
    assert "--block-size" not in only(monkeypatch, blockSize=None).argv


def test_events_are_on_sockets_that_engine_and_adapter_alone_can_enter(pod: EnginePod) -> None:
    adapter = pod.spec["containers"][0]
    paths = [pod.adapter["kv_events"], pod.adapter["kv_events_replay"]]
    folder = "/run/kvferry/engine"
    assert all(not path or path.startswith(f"ipc://{folder}/") for path in paths)
    assert all(len(path.removeprefix("ipc://")) < 100 for path in paths), "a socket's path has 107 bytes at most"
    (volume,) = pod.volumes_at(pod.engine, folder)
    assert pod.volumes_at(adapter, folder) == [volume]
    others = [
        each for each in (*pod.spec["initContainers"], *pod.spec["containers"]) if each not in (pod.engine, adapter)
    ]
    assert not any(volume == mount["name"] for each in others for mount in each["volumeMounts"])
    assert next(each for each in pod.spec["volumes"] if each["name"] == volume)["emptyDir"]
    users = [each["securityContext"].get("runAsUser") for each in (pod.engine, adapter)]
    assert users == [None, None], "both are the pod's user"


def test_the_adapter_drains_before_the_engine_ends(pod: EnginePod) -> None:
    """Kubernetes ends sidecars only when all other containers have ended, in the reverse order of their start."""
    sidecars = [each["name"] for each in pod.spec["initContainers"] if each.get("restartPolicy") == "Always"]
    assert sidecars[-1] == "engine"
    assert "engine" not in [each["name"] for each in pod.spec["containers"]]
    assert "lifecycle" not in pod.engine
    grace = pod.spec["terminationGracePeriodSeconds"]
    assert grace >= pod.adapter["drain_timeout"] + 2 * SPARE_S


def test_an_engine_may_start_slowly_and_an_adapter_waits_as_long(objects: Objects, pod: EnginePod) -> None:
    probe = pod.engine["startupProbe"]
    allowed = probe["failureThreshold"] * probe["periodSeconds"]
    assert allowed >= 3600
    assert pod.adapter["engine_timeout"] >= allowed, "an engine that crashed loads beside an adapter that runs"
    deadline = of_kind(objects, "Deployment")[pod.name]["spec"]["progressDeadlineSeconds"]
    assert deadline >= allowed + pod.spec["terminationGracePeriodSeconds"]


def test_probes_and_scrapes_ask_the_adapter_s_port(objects: Objects, pod: EnginePod) -> None:
    annotations = of_kind(objects, "Deployment")[pod.name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(pod.adapter["port"])
    assert not pod.engine.get("ports"), "a scrape has one target a pod"
    adapter = pod.spec["containers"][0]
    (port,) = adapter["ports"]
    assert (port["name"], port["containerPort"]) == ("http", pod.adapter["port"])
    asked = {kind: adapter[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {each["port"] for each in asked.values()} == {"http"}
    assert [asked[kind]["path"] for kind in asked] == ["/health", "/ready", "/health"]


class Health(BaseHTTPRequestHandler):
    """A server's health: answers with `status`."""

    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def health() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_probes_of_the_engine_tell_a_well_one_from_others(
    kind: str, health: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as they are rendered, with this Python."""
    image = {"llamacpp": {"engine": kind, "model": "/m/m.gguf"}}.get(kind, {"engine": kind})
    pod = only(monkeypatch, port=max(1024, health), **image)
    for name in ("startupProbe", "livenessProbe"):
        program, *words = pod.engine[name]["exec"]["command"]
        found = sys.executable if program == "python3" else shutil.which(program)
        if found is None:
            pytest.skip(f"no {program} here")
        for status, well in ((200, True), (503, False)):
            monkeypatch.setattr(Health, "status", status)
            assert (subprocess.run([found, *words], capture_output=True).returncode == 0) == well, (name, status)
        closed = [word.replace(str(health), "1") for word in words]
        assert subprocess.run([found, *closed], capture_output=True).returncode


def test_prefill_engines_and_those_that_fetch_from_them_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl_values = {"enabled": True, "leaseSeconds": 12}
    for role in ("prefill", "decode"):
        pod = only(monkeypatch, role=role, nixl=nixl_values)
        assert (pod.adapter["role"], pod.adapter["kv_transfer"], pod.adapter["kv_lease"]) == (role, "nixl", 12)
        assert json.loads(pod.after("--kv-transfer-config")) == {
            key: value for key, value in nixl(12).items() if key != "kv_buffer_device"
        }
    assert only(monkeypatch).adapter["kv_transfer"] == "auto"


def test_nixl_needs_the_pod_s_address_and_open_ports(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = engine_pods(objects, monkeypatch)
    env = {each["name"]: each for each in pods["vllm"].engine["env"]}
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == "5600"
    policy = of_kind(objects, "NetworkPolicy")["kvferry-engines"]["spec"]["ingress"]
    assert "ports" not in policy[-1]
    assert policy[-1]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    plain = chart(**{**ENGINES, "engines": ENGINES["engines"][1:]})
    assert all("ports" in rule for rule in of_kind(plain, "NetworkPolicy")["kvferry-engines"]["spec"]["ingress"])
    assert "VLLM_NIXL" not in json.dumps(plain)


def test_the_hub_s_token_and_downloads_are_the_engine_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = only(monkeypatch, model="org/m", tokenSecret={"name": "hub"}, cache={"existingClaim": "kept"})
    env = {each["name"]: each for each in pod.engine["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "HF_TOKEN" not in json.dumps(pod.spec["containers"])
    (cache,) = pod.volumes_at(pod.engine, env["HOME"]["value"])
    assert env["HF_HOME"]["value"].startswith(env["HOME"]["value"])
    volume = next(each for each in pod.spec["volumes"] if each["name"] == cache)
    assert volume["persistentVolumeClaim"]["claimName"] == "kept"
    assert not re.search("kvferry-models", json.dumps(pod.spec)), "it reads none of the release's volumes"
