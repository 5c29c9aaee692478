"""The Helm chart as Kubernetes would see it, rendered by helm itself."""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.binaries import ROOT, helm_binary, need
from tests.deploy.manifests import Manifest

HELM = ROOT / "deploy" / "helm"
CHART, EXAMPLES = HELM / "kvferry", HELM / "examples"
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "app.kubernetes.io/instance")
"""Labels that the chart adds to what the overlays have."""
BY_NAME = ("env", "volumes", "volumeMounts", "initContainers", "ports")
"""Lists in which the order means nothing here."""


def chart(release: str = "kvferry", *, examples: tuple[str, ...] = (), **values: Any) -> tuple[Manifest, ...]:
    """All objects of a release in the namespace kvferry, the test's pod among them. Values of Python go on top of those
    of the examples. Skips the test where no helm can be had."""
    done = helm(release, examples, json.dumps(values, sort_keys=True))
    assert done.returncode == 0, done.stderr
    return tuple(copy.deepcopy(item) for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item)


def refusal(**values: Any) -> str:
    """What helm says to values that it refuses."""
    done = helm("kvferry", (), json.dumps(values, sort_keys=True))
    assert done.returncode != 0, "these values are rendered"
    return done.stderr


@functools.cache
def helm(release: str, examples: tuple[str, ...], values: str) -> subprocess.CompletedProcess[str]:
    """`helm template` with no cluster to ask."""
    binary = need(helm_binary(), "helm")
    files = [word for name in examples for word in ("-f", str(EXAMPLES / f"{name}.yaml"))]
    command: list[str | Path] = [
        binary,
        "template",
        release,
        CHART,
        "-n",
        "kvferry",
        "--kube-version",
        "1.37",
        *files,
        "-f",
        "-",
    ]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=120)


def plain(objects: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """Objects by kind and name, without what a way of installing adds: labels, hashes in names and of settings, the
    namespace; without the objects that only one of them has (namespace, Secrets, the test's pod)."""
    text = json.dumps([item for item in objects if item["kind"] not in ("Namespace", "Secret", "Pod")])
    text = re.sub(r'"(kvferry-(?:cluster|worker|model|model-script))-(?:[a-z0-9]{10}|[0-9a-f]{8})"', r'"\1"', text)
    found: dict[str, Manifest] = {}
    for item in _plain(json.loads(text)):
        item["metadata"].pop("namespace", None)
        item["metadata"].get("labels", {}).pop("app.kubernetes.io/part-of", None)
        item["metadata"].pop("annotations", None)
        found[f"{item['kind']} {item['metadata']['name']}"] = item
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {name: _plain(each) for name, each in value.items() if name not in (*OF_HELM, "checksum/settings")}
    for name in BY_NAME:
        if isinstance(made.get(name), list):
            made[name] = sorted(made[name], key=lambda each: each.get("name") or str(each))
    if "app.kubernetes.io/component" in made:
        made.pop("app.kubernetes.io/part-of", None)
    return made
