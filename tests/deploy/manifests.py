"""The manifests as Kubernetes would see them, and the command lines that their containers run."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.binaries import ROOT, kubectl_binary, need
from tests.deploy.dockerfile import read_dockerfile

Manifest = dict[str, Any]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("cpu", "gpu")
PROCESSES = ("kvferry-router", "kvferry-prefill", "kvferry-decode")
IMAGES = {"kvferry/router": "Dockerfile.router", "kvferry/worker": "Dockerfile.worker"}


@functools.cache
def render(overlay: str) -> tuple[Manifest, ...]:
    """All objects of an overlay. Skips the test where no kubectl can be had."""
    binary = need(kubectl_binary(), "kubectl")
    folder = K8S / "overlays" / overlay
    done = subprocess.run([binary, "kustomize", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    """Objects of one kind by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def pod_spec(overlay: str, deployment: str) -> Manifest:
    spec: Manifest = of_kind(render(overlay), "Deployment")[deployment]["spec"]["template"]["spec"]
    return spec


def manifest_command(
    deployment: str, overlay: str = "cpu", fields: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """What the Deployment's container runs: argv as `["kvferry", "prefill", "--host=0.0.0.0", …]` and its whole
    environment as the manifest gives it (ConfigMaps resolved, optional Secrets absent). `fields` are the pod's own
    (`metadata.name`, `status.podIP`), which the kubelet would fill in."""
    objects = render(overlay)
    container = pod_spec(overlay, deployment)["containers"][0]
    given = {"metadata.name": f"{deployment}-0", "status.podIP": "127.0.0.1", **(fields or {})}
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        env.update(of_kind(objects, "ConfigMap")[source["configMapRef"]["name"]]["data"])
    for entry in container.get("env", ()):
        value = _value(entry, given)
        if value is not None:
            env[entry["name"]] = value
    return [*_entrypoint(container), *container.get("args", ())], env


def _value(entry: Manifest, fields: Mapping[str, str]) -> str | None:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return fields[source["fieldRef"]["fieldPath"]]
    assert source["secretKeyRef"]["optional"], entry
    return None


def _entrypoint(container: Manifest) -> list[str]:
    """The container's command, or the ENTRYPOINT of its image without the init in front."""
    if "command" in container:
        return list(container["command"])
    entrypoint = read_dockerfile(docker_file(container["image"])).entrypoint
    return entrypoint[entrypoint.index("--") + 1 :] if "--" in entrypoint else entrypoint


def docker_file(image: str) -> Path:
    """The Dockerfile of one of our images."""
    return ROOT / "deploy" / "docker" / IMAGES[image.partition(":")[0]]
