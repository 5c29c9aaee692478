"""The manifests as Kubernetes would see them, and the command lines that their containers run."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.binaries import ROOT, kubectl_binary, need
from tests.deploy.dockerfile import read_dockerfile

Manifest = dict[str, Any]
Objects = tuple[Manifest, ...]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("cpu", "gpu")
PROCESSES = ("kvferry-router", "kvferry-prefill", "kvferry-decode")
ENGINE_IMAGES = ("vllm/vllm-openai", "lmsysorg/sglang", "ggml-org/llama.cpp")
"""Images of other projects' engines, which run beside adapters."""
IMAGES = {"kvferry/router": "Dockerfile.router", "kvferry/worker": "Dockerfile.worker"}
SECRET = "0" * 64
"""What every Secret holds here, unless a test says otherwise."""


@functools.cache
def render(overlay: str, *components: str) -> Objects:
    """All objects of an overlay, with components on top. Skips the test where no kubectl can be had."""
    binary = need(kubectl_binary(), "kubectl")
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above)
        within = {"resources": [f"overlays/{overlay}"], "components": [f"components/{name}" for name in components]}
        paths = {
            kind: [os.path.relpath(K8S / name, folder.resolve()) for name in names] for kind, names in within.items()
        }
        frame = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **paths}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(frame))
        source = folder if components else K8S / "overlays" / overlay
        done = subprocess.run([binary, "kustomize", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def of_kind(objects: Objects, kind: str) -> dict[str, Manifest]:
    """Objects of one kind by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def pod_specs(objects: Objects) -> dict[str, Manifest]:
    """Those of all pods, whatever makes them, by its name."""
    made = {name: item["spec"] for name, item in of_kind(objects, "Pod").items()}
    for kind in ("Deployment", "StatefulSet", "Job"):
        made |= {name: item["spec"]["template"]["spec"] for name, item in of_kind(objects, kind).items()}
    return made


def render_within(overlay: str, *components: str) -> Objects:
    """All objects of an overlay that names the components itself, so that its settings and images reach them.

    Skips the test where no kubectl can be had."""
    binary = need(kubectl_binary(), "kubectl")
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "k8s"
        shutil.copytree(K8S, folder)
        file = folder / "overlays" / overlay / "kustomization.yaml"
        named = json.dumps([f"../../components/{each}" for each in components])
        file.write_text(f"{file.read_text()}components: {named}\n")
        done = subprocess.run([binary, "kustomize", file.parent], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def manifest_command(
    deployment: str, overlay: str = "cpu", fields: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """`container_command` of an overlay's Deployment."""
    return container_command(render(overlay), deployment, fields)


def container_command(
    objects: Objects, deployment: str, fields: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """What the Deployment's container runs: argv as `["kvferry", "prefill", "--host=0.0.0.0", …]` and its whole
    environment as the manifest gives it (ConfigMaps resolved, Secrets hold SECRET, optional ones are absent). `fields`
    are the pod's own (`metadata.name`, `status.podIP`), which the kubelet would fill in."""
    container = pod_specs(objects)[deployment]["containers"][0]
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
    return None if source["secretKeyRef"].get("optional") else SECRET


def _entrypoint(container: Manifest) -> list[str]:
    """The container's command, or the ENTRYPOINT of its image without the init in front."""
    if "command" in container:
        return list(container["command"])
    entrypoint = read_dockerfile(docker_file(container["image"])).entrypoint
    return entrypoint[entrypoint.index("--") + 1 :] if "--" in entrypoint else entrypoint


def docker_file(image: str) -> Path:
    """The Dockerfile of one of our images, in whatever registry."""
    name = "/".join(image.partition(":")[0].split("/")[-2:])
    return ROOT / "deploy" / "docker" / IMAGES[name]
